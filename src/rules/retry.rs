//! When a command is tried again, and how long it may be tried at all.

/// What is done when nobody knows whether an attempt had its effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnUnknown {
    /// In doubt until a person resolves it. The only answer that can be undone.
    Hold,
    /// Sent again under the same id with the same bytes, inside `resend_window`.
    Resend,
}

impl OnDead {
    /// The word that configuration uses.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Continue => "continue",
            Self::Block => "block",
        }
    }

    /// Reads [`OnDead::as_str`] back.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Continue, Self::Block].into_iter().find(|policy| policy.as_str() == text)
    }
}

impl OnUnknown {
    /// The word that configuration and database use.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Resend => "resend",
        }
    }

    /// Reads [`OnUnknown::as_str`] back.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Hold, Self::Resend].into_iter().find(|policy| policy.as_str() == text)
    }
}

/// What becomes of a command that is refused, or has no tries left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnDead {
    /// It is dead, and its lane goes on.
    Continue,
    /// It is parked with that reason and stays the head of its lane, until it is adopted or discarded.
    Block,
}

/// How chance is mixed into a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Jitter {
    /// Anything from 0 to the bound: spreads many senders best (webhooks).
    Full,
    /// The bound plus up to half of it: a greylisting mail server wants the whole wait.
    UpToHalfMore,
}

/// A growing wait between attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Backoff {
    /// Bound of the first wait, in milliseconds.
    pub base_ms: i64,
    /// Greatest bound, in milliseconds.
    pub cap_ms: i64,
    /// How chance is mixed in.
    pub jitter: Jitter,
}

/// What limits the attempts of a command, by its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    /// What an unknown outcome leads to.
    pub on_unknown: OnUnknown,
    /// What a refusal, or the end of the tries, leads to.
    pub on_dead: OnDead,
    /// Tries that may be used up.
    pub max_attempts: u32,
    /// Time from the first begin after which no try is left, in milliseconds.
    pub max_age_ms: i64,
    /// Time from the begin of the first attempt that ended unknown in which `resend` may repeat, in
    /// milliseconds.
    pub resend_window_ms: i64,
    /// The wait between attempts.
    pub backoff: Backoff,
}

impl Limits {
    /// No limit at all, for answers and ends that don't depend on a destination.
    pub const NONE: Self = Self {
        on_unknown: OnUnknown::Hold,
        on_dead: OnDead::Continue,
        max_attempts: u32::MAX,
        max_age_ms: i64::MAX,
        resend_window_ms: i64::MAX,
        backoff: Backoff { base_ms: 1, cap_ms: 1, jitter: Jitter::Full },
    };
}

/// The bound from which the wait after failure number `failures` (0, 1, 2 …) is drawn: it doubles
/// from `base_ms` to `cap_ms`, and no number overflows it.
pub fn backoff_bound_ms(failures: u32, backoff: &Backoff) -> i64 {
    let factor = 1_i64.checked_shl(failures).filter(|factor| *factor > 0).unwrap_or(i64::MAX);
    let cap = backoff.cap_ms.max(1);
    backoff.base_ms.max(1).saturating_mul(if failures > 61 { i64::MAX } else { factor }).min(cap)
}

/// The wait after failure number `failures`, in milliseconds. `jitter` is drawn by the caller from
/// 0 … 1000; more counts as 1000.
pub fn backoff_ms(failures: u32, jitter: u32, backoff: &Backoff) -> i64 {
    let bound = backoff_bound_ms(failures, backoff);
    let share = |of: i64| {
        let drawn = i128::from(of) * i128::from(jitter.min(1000)) / 1000;
        i64::try_from(drawn).unwrap_or(of)
    };
    match backoff.jitter {
        Jitter::Full => share(bound),
        Jitter::UpToHalfMore => bound.saturating_add(share(bound / 2)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600_000;

    /// H31 in its pure part: no counter overflows the wait, and the bound never falls.
    #[test]
    fn h31_backoff_never_overflows() {
        for jitter_kind in [Jitter::Full, Jitter::UpToHalfMore] {
            let backoff = Backoff { base_ms: 1000, cap_ms: HOUR, jitter: jitter_kind };
            let mut last = 0;
            for failures in (0..130).chain([1000, i32::MAX as u32, u32::MAX]) {
                let bound = backoff_bound_ms(failures, &backoff);
                assert!((1000..=HOUR).contains(&bound), "{failures}: {bound}");
                assert!(bound == HOUR || bound == 1000 << failures, "{failures}: {bound} doubles");
                assert!(bound >= last, "{failures}: the bound never falls");
                last = bound;
                for jitter in [0, 1, 500, 1000, u32::MAX] {
                    let wait = backoff_ms(failures, jitter, &backoff);
                    let greatest = if jitter_kind == Jitter::Full { bound } else { bound + bound / 2 };
                    assert!((0..=greatest).contains(&wait), "{failures} {jitter}: {wait}");
                }
            }
        }
    }

    #[test]
    fn mail_waits_at_least_its_bound() {
        let mail = Backoff { base_ms: 300_000, cap_ms: 4 * HOUR, jitter: Jitter::UpToHalfMore };
        assert_eq!(backoff_ms(0, 0, &mail), 300_000);
        assert_eq!(backoff_ms(0, 1000, &mail), 450_000);
        assert_eq!(backoff_ms(40, 1000, &mail), 6 * HOUR);
    }

    #[test]
    fn absurd_settings_stay_finite() {
        let backoff = Backoff { base_ms: i64::MAX, cap_ms: i64::MAX, jitter: Jitter::UpToHalfMore };
        assert_eq!(backoff_ms(u32::MAX, 1000, &backoff), i64::MAX);
        let backoff = Backoff { base_ms: -5, cap_ms: -5, jitter: Jitter::Full };
        assert_eq!(backoff_bound_ms(3, &backoff), 1);
    }
}
