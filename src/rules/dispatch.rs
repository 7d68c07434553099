//! What may be begun: the fence in front of the effect.

use super::{EffectState, State};

/// So many starts that found an attempt open end a command, whatever its limits say.
pub const FOUND_OPEN_MAX: u32 = 5;

/// Starts in a row that found an attempt open from which on a command is a suspect.
const SUSPECT_STARTS: u32 = 2;

/// What must be known of a command and its lane before an attempt begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// Where the command stands.
    pub state: State,
    /// What can have happened outside already.
    pub effect: EffectState,
    /// Era, token and seq: what never goes back in a lane.
    pub order: (i64, i64, i64),
    /// The greatest order that was begun in the lane.
    pub begun: (i64, i64, i64),
    /// The lowest live seq of the lane.
    pub head_seq: i64,
    /// When the command is due.
    pub due_ms: i64,
    /// When its time is over.
    pub expires_at_ms: Option<i64>,
    /// Whether its destination, its scope or everything is paused.
    pub paused: bool,
}

/// What the rules say of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// An attempt may begin now.
    Begin,
    /// It ends without an attempt: its time is over.
    Expire,
    /// It ends without an attempt: something greater was begun in its lane.
    Fence,
    /// An older command of the lane is live.
    NotHead,
    /// It is being sent, in doubt, parked or final.
    NotPending,
    /// It is due later.
    NotDue,
    /// Its destination, its scope or everything is paused.
    Paused,
    /// Its time is over, but the clock jumped and is not trusted yet.
    ClockUnsteady,
}

/// Whether a command may begin now. `steady` tells that the clock has not jumped lately.
pub fn look(candidate: &Candidate, now_ms: i64, steady: bool) -> Verdict {
    let waits = matches!(candidate.state, State::Pending | State::Parked(_));
    let expired = candidate.expires_at_ms.is_some_and(|expires_at_ms| expires_at_ms <= now_ms);
    if candidate.order.2 != candidate.head_seq {
        Verdict::NotHead
    } else if !waits {
        Verdict::NotPending
    } else if expired && !steady {
        Verdict::ClockUnsteady
    } else if expired {
        Verdict::Expire
    } else if candidate.state != State::Pending {
        Verdict::NotPending
    } else if candidate.order < candidate.begun {
        Verdict::Fence
    } else if candidate.due_ms > now_ms {
        Verdict::NotDue
    } else if candidate.paused {
        Verdict::Paused
    } else {
        Verdict::Begin
    }
}

/// Whether a command is sent alone: two starts in a row found it open, so it may be what kills the
/// process.
pub const fn is_suspect(found_in_a_row: u32) -> bool {
    found_in_a_row >= SUSPECT_STARTS
}
