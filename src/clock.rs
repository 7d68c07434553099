//! The only reader of time.
//!
//! Two clocks: due, expiry and lease times are wall clock, since they are compared across processes
//! and restarts; how long something took is boot time, which counts a suspend. A wall clock that moves
//! against boot time was set, and is not trusted for a while.

use std::pin::pin;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::faults;

/// A wall clock that moved further than this against boot time has jumped.
pub const JUMP_MS: i64 = 5_000;

/// How long the clock must keep step after a jump before an expiry is believed again.
pub const STEADY_MS: i64 = 60_000;

/// Both clocks at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Milliseconds since 1970.
    pub wall_ms: i64,
    /// Milliseconds since the machine was started, suspends included.
    pub boot_ms: i64,
}

/// Reads both clocks.
pub fn now() -> Now {
    let moved = faults::clocks();
    Now {
        wall_ms: read(ClockId::Realtime).saturating_add(moved.wall_ms),
        boot_ms: read(ClockId::Boottime).saturating_add(moved.boot_ms),
    }
}

/// The wall clock, in milliseconds since 1970.
pub fn wall_ms() -> i64 {
    now().wall_ms
}

/// A deadline has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the deadline has passed")]
pub struct Elapsed;

/// The longest time without a look at the boot-time clock while a deadline is awaited.
const DEADLINE_LOOK: Duration = Duration::from_secs(1);

/// Awaits `work`, at most for `limit` of boot time.
///
/// A timer of the runtime stands still while the machine is suspended, so what had 30 seconds would
/// still have most of them two hours later. Here a suspend counts: at most a second after the resume
/// the deadline has passed. What is ready by then still wins, since it did happen in time.
pub async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Result<T, Elapsed> {
    let limit_ms = i64::try_from(limit.as_millis()).unwrap_or(i64::MAX);
    let end_ms = now().boot_ms.saturating_add(limit_ms);
    let mut work = pin!(work);
    let mut left = limit;
    loop {
        if let Ok(done) = tokio::time::timeout(left.min(DEADLINE_LOOK), &mut work).await {
            return Ok(done);
        }
        left = Duration::from_millis(u64::try_from(end_ms.saturating_sub(now().boot_ms)).unwrap_or(0));
        if left.is_zero() {
            return Err(Elapsed);
        }
    }
}

fn read(clock: ClockId) -> i64 {
    let time = clock_gettime(clock);
    time.tv_sec.saturating_mul(1_000).saturating_add(time.tv_nsec / 1_000_000)
}

/// What a look at the clocks found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Jump {
    /// The wall clock kept step.
    None,
    /// It was set forward, or the difference is a suspend that it slept through.
    Forward,
    /// It was set back.
    Back,
}

/// Compares the two clocks over time.
#[derive(Clone, Copy, Debug)]
pub struct Watch {
    offset_ms: i64,
    unsteady_until_boot_ms: Option<i64>,
}

impl Watch {
    /// Starts to compare; the clock counts as steady.
    pub const fn new(now: Now) -> Self {
        Self { offset_ms: now.wall_ms.saturating_sub(now.boot_ms), unsteady_until_boot_ms: None }
    }

    /// Compares the clocks with the last look.
    pub fn look(&mut self, now: Now) -> Jump {
        let offset_ms = now.wall_ms.saturating_sub(now.boot_ms);
        let moved_ms = offset_ms.saturating_sub(self.offset_ms);
        if moved_ms.saturating_abs() <= JUMP_MS {
            // Small steps and slewing are followed, so that they never add up to a jump.
            self.offset_ms = offset_ms;
            return Jump::None;
        }
        self.offset_ms = offset_ms;
        self.unsteady_until_boot_ms = Some(now.boot_ms.saturating_add(STEADY_MS));
        if moved_ms < 0 { Jump::Back } else { Jump::Forward }
    }

    /// Whether the clock has not jumped within the last [`STEADY_MS`].
    pub fn is_steady(&self, now: Now) -> bool {
        self.unsteady_until_boot_ms.is_none_or(|until| now.boot_ms >= until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(wall_ms: i64, boot_ms: i64) -> Now {
        Now { wall_ms, boot_ms }
    }

    #[test]
    fn a_jump_makes_the_clock_unsteady_for_a_minute() {
        let mut watch = Watch::new(at(1_000_000, 0));
        assert_eq!(watch.look(at(1_010_000, 10_000)), Jump::None);
        assert_eq!(watch.look(at(1_025_001, 20_000)), Jump::Forward);
        assert!(!watch.is_steady(at(1_025_001, 20_000)));
        assert!(!watch.is_steady(at(1_084_999, 79_999)));
        assert!(watch.is_steady(at(1_085_001, 80_000)));
        assert_eq!(watch.look(at(1_000_000, 81_000)), Jump::Back);
        assert!(!watch.is_steady(at(1_000_000, 81_000)));
    }

    #[test]
    fn a_deadline_passes_and_what_is_ready_wins() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let limit = Duration::from_millis(20);
        assert_eq!(runtime.block_on(async { within(limit, std::future::pending::<()>()).await }), Err(Elapsed));
        assert_eq!(runtime.block_on(async { within(Duration::ZERO, std::future::ready(7)).await }), Ok(7));
    }

    #[test]
    fn slewing_is_no_jump() {
        let mut watch = Watch::new(at(0, 0));
        for second in 1..1_000 {
            assert_eq!(watch.look(at(second * 1_100, second * 1_000)), Jump::None);
        }
    }
}
