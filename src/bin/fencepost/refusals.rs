//! What refused workers usually mean.
//!
//! A refusal leaves two numbers and a count. What they mean is a guess, and is said as one; where they
//! go on and on it is no stray worker any more, and somebody has to look.

use fencepost::sqlite::inspect::Refusal;

use crate::output::clean;

/// So many refusals of one scope, the last of them within so long, don't come from one paused worker.
const SUSTAINED: (i64, i64) = (10, 3_600_000);

/// Seconds since 1970, of 2001 to 2286. Finer clocks count from there on.
const A_CLOCK: i64 = 1_000_000_000;

/// What this one usually means, by how the two numbers stand to each other.
pub(crate) fn meaning(refusal: &Refusal) -> &'static str {
    let Refusal { token, watermark, count, .. } = refusal;
    if token > watermark && *token >= A_CLOCK {
        "the token looks like a clock: a lease service counts its leases, and nothing else may number them"
    } else if token > watermark {
        "the token was never sealed, or jumped too far: seal first, or look for a typo"
    } else if token == watermark {
        "two holders or two services number one lease: check who hands the tokens out"
    } else if *watermark >= A_CLOCK && *token < A_CLOCK {
        "the watermark looks like a clock: somebody used the time as a token, and real ones are below it"
    } else if *count >= SUSTAINED.0 {
        "a worker that doesn't stop after a refusal; or the lease service was restored, or a second one counts from the start"
    } else {
        "an old holder went on working, as after a pause, when its lease was taken over: it was stopped, and that is all"
    }
}

/// What must be said aloud of refusals that go on: what it is and what cures it.
pub(crate) fn sustained(refusals: &[Refusal], now_ms: i64) -> Vec<(String, &'static str)> {
    let goes_on =
        |refusal: &&Refusal| refusal.count >= SUSTAINED.0 && now_ms.saturating_sub(refusal.last_ms) <= SUSTAINED.1;
    let line = |refusal: &Refusal| {
        let Refusal { token, watermark, count, .. } = refusal;
        let scope = clean(&refusal.scope);
        let says = format!("sustained refusals, scope {scope}, watermark {watermark}, seen {token}, {count} in all");
        (says, cure(refusal))
    };
    refusals.iter().filter(goes_on).map(line).collect()
}

fn cure(refusal: &Refusal) -> &'static str {
    if refusal.token < refusal.watermark {
        "if the lease service counts from the start again, bind the scope to it: fencepost scope rebase; \
         if it doesn't, find the worker that goes on without a lease"
    } else {
        "check which service hands out this scope's tokens, and that its holders seal before they write"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_numbers_say() {
        for (token, watermark, count, word) in [
            (4, 5, 1, "old holder went on"),
            (10, 5_000, 10, "restored"),
            (5, 5, 1, "two holders"),
            (7, 5, 1, "never sealed"),
            (1_800_000_000, 5, 1, "looks like a clock"),
            (6, 1_800_000_000_000, 1, "watermark looks like a clock"),
        ] {
            let refusal = Refusal { scope: "s".to_owned(), token, watermark, count, last_ms: 1_000 };
            assert!(meaning(&refusal).contains(word), "{refusal:?}: {}", meaning(&refusal));
            let loud = sustained(std::slice::from_ref(&refusal), 2_000);
            assert_eq!(loud.len(), usize::from(count >= 10));
            assert!(sustained(&[refusal], 4_000_000).is_empty(), "an hour later");
        }
    }
}
