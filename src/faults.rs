//! Named points at which a test build can be stopped or killed. In every other build they are nothing.
//!
//! `FENCEPOST_FAULT=POINT:DESTINATION:ACTION` names one point, the destination that it is for (`*` for
//! any) and what happens there: `kill` (SIGKILL to the process itself), `abort`, or `pause` (the thread
//! stays there while the file that `FENCEPOST_FAULT_FILE` names exists).

/// Whether a rule is switched off, by its name in `FENCEPOST_BREAK`: a test that stays green then tests
/// nothing.
#[cfg(feature = "faults")]
pub(crate) fn is_broken(rule: &str) -> bool {
    std::env::var("FENCEPOST_BREAK").is_ok_and(|broken| broken == rule)
}

/// Whether a rule is switched off.
#[cfg(not(feature = "faults"))]
pub(crate) const fn is_broken(_rule: &str) -> bool {
    false
}

/// Passes a point.
#[cfg(feature = "faults")]
pub(crate) fn point(name: &str, destination: &str) {
    let Ok(wanted) = std::env::var("FENCEPOST_FAULT") else { return };
    let mut parts = wanted.split(':');
    let (point, at, action) = (parts.next(), parts.next(), parts.next());
    if point != Some(name) || (at != Some(destination) && at != Some("*")) {
        return;
    }
    match action {
        Some("kill") => {
            let own = rustix::process::getpid();
            rustix::process::kill_process(own, rustix::process::Signal::KILL).expect("a process may kill itself");
            std::thread::park();
        }
        Some("abort") => std::process::abort(),
        Some("pause") => {
            let file = std::env::var("FENCEPOST_FAULT_FILE").unwrap_or_default();
            while std::path::Path::new(&file).exists() {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
        _ => panic!("FENCEPOST_FAULT={wanted}: no such action"),
    }
}

/// Passes a point.
#[cfg(not(feature = "faults"))]
pub(crate) const fn point(_name: &str, _destination: &str) {}
