//! The worker side in one page.
fn main() {}
