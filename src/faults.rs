//! Named points at which a test build can be stopped or killed. In every other build they are nothing.
//!
//! `FENCEPOST_FAULT=POINT:DESTINATION:ACTION` names one point, the destination that it is for (`*` for
//! any) and what happens there: `kill` (SIGKILL to the process itself), `abort`, or `pause` (the thread
//! stays there while the file that `FENCEPOST_FAULT_FILE` names exists).
//!
//! `FENCEPOST_FAULT_CLOCK` names a file with two numbers, in milliseconds: what is added to the wall clock
//! and to the boot-time clock. The file is read at every look at a clock, so a test moves the clocks of a
//! running process. A library that fakes the clock from outside can't do that: the clocks are read
//! without the C library.
//! `FENCEPOST_FAULT_WATCH=none` takes the notifications of other processes' commits away; a path makes
//! the watch get lost once that file exists.

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

/// What a test adds to the clocks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Clocks {
    /// Added to the wall clock.
    pub(crate) wall_ms: i64,
    /// Added to the boot-time clock.
    pub(crate) boot_ms: i64,
}

/// The clocks as a test wants them.
#[cfg(feature = "faults")]
pub(crate) fn clocks() -> Clocks {
    let Ok(path) = std::env::var("FENCEPOST_FAULT_CLOCK") else { return Clocks::default() };
    // A test that hasn't written the file yet moves nothing.
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut numbers = text.split_whitespace().map(|word| word.parse().expect("the fault clock has numbers"));
    Clocks { wall_ms: numbers.next().unwrap_or(0), boot_ms: numbers.next().unwrap_or(0) }
}

/// The clocks as they are.
#[cfg(not(feature = "faults"))]
pub(crate) const fn clocks() -> Clocks {
    Clocks { wall_ms: 0, boot_ms: 0 }
}

/// Fails where a test takes the notifications away.
#[cfg(feature = "faults")]
pub(crate) fn watch_setup() -> std::io::Result<()> {
    match std::env::var("FENCEPOST_FAULT_WATCH").as_deref() {
        // What inotify_init says when the user has no instance left.
        Ok("none") => Err(rustix::io::Errno::MFILE.into()),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Nothing is taken away.
#[cfg(not(feature = "faults"))]
pub(crate) const fn watch_setup() -> std::io::Result<()> {
    Ok(())
}

/// Whether a test wants the next event to say that the watch is lost. Says so once for each file.
#[cfg(feature = "faults")]
pub(crate) fn watch_is_lost() -> bool {
    std::env::var("FENCEPOST_FAULT_WATCH").is_ok_and(|path| std::fs::remove_file(path).is_ok())
}

/// Only the system says so.
#[cfg(not(feature = "faults"))]
pub(crate) const fn watch_is_lost() -> bool {
    false
}
