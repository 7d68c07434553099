//! Integration tests: one binary, a module per concern. Cases from production carry their number.
#![allow(clippy::allow_attributes, reason = "the lints below are lifted for tests alone")]
#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm, reason = "a test may fail loudly")]
#![allow(clippy::disallowed_methods, reason = "tests measure with real time")]
#![allow(unreachable_pub, missing_docs, missing_debug_implementations, dead_code, reason = "test helpers")]
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::print_stdout, reason = "test helpers")]

mod support;

mod audit;
/// The example, so that its effect can be checked as a user would check it.
#[path = "../../examples/custom_effect.rs"]
mod custom_effect;

mod bypass;
mod cases;
mod cli;
mod clock;
mod compose;
mod config;
mod conformance;
mod contract;
mod controls;
mod copies;
mod demo;
mod dispatch;
mod doctor;
mod email;
mod events;
mod examples;
mod guard;
mod hostile;
mod life;
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
mod takeover;
mod tidy;
mod verbs;
mod webhook;
mod why;
mod worker;
