//! Integration tests: one binary, a module per concern. Cases from production carry their number.
#![allow(clippy::allow_attributes, reason = "the lints below are lifted for tests alone")]
#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm, reason = "a test may fail loudly")]
#![allow(clippy::disallowed_methods, reason = "tests measure with real time")]
#![allow(unreachable_pub, missing_docs, missing_debug_implementations, dead_code, reason = "test helpers")]
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::print_stdout, reason = "test helpers")]

mod support;

mod bypass;
mod cases;
mod cli;
mod compose;
mod config;
mod contract;
mod copies;
mod demo;
mod dispatch;
mod email;
mod examples;
mod guard;
mod load;
mod locks;
mod mutants;
mod python;
mod recovery;
mod retention;
mod schema;
mod secrets;
mod sink;
mod statechart;
mod tidy;
mod webhook;
mod worker;
