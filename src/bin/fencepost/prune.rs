//! `fencepost prune`: what is finished and old goes, by hand.
//!
//! Without an age nothing of its sort goes: what is removed is said in full on the command line. It works
//! in small transactions with pauses between them, so that workers and the dispatcher go on beside it,
//! and may be stopped at any time.

use std::time::Duration;

use fencepost::clock::wall_ms;
use fencepost::sqlite::retention::{Ages, Gone, pass, plan};
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::output::parse_age;
use crate::{Globals, database};

/// The shortest pause between two transactions; a long one is followed by a pause as long as it was.
const PAUSE_MIN: Duration = Duration::from_millis(2);

/// Options of `fencepost prune`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Remove delivered commands that ended so long ago, from the front of their scope
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    delivered_older_than: Option<Duration>,
    /// Remove dead commands that ended so long ago, from the front of their scope
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    dead_older_than: Option<Duration>,
    /// Erase payload and headers of commands that ended so long ago; id, key and a hash stay
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    erase_older_than: Option<Duration>,
    /// Remove events of the feed
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    events_older_than: Option<Duration>,
    /// Only say what would go
    #[arg(long)]
    dry_run: bool,
}

impl Args {
    const fn ages(&self) -> Ages {
        Ages {
            delivered: self.delivered_older_than,
            dead: self.dead_older_than,
            erase: self.erase_older_than,
            events: self.events_older_than,
        }
    }
}

/// Prunes, or with `--dry-run` counts.
pub(crate) fn prune(args: &Args, globals: &Globals) -> anyhow::Result<()> {
    let ages = args.ages();
    if ages == Ages::default() {
        let hint = "give at least one age, as in --delivered-older-than 30d";
        return Err(Failure::usage("nothing is said to be old").hint(hint).into());
    }
    let screen = globals.screen();
    let progress = screen.progress("looking for what is old");
    let gone = if args.dry_run {
        plan(&database::read(globals)?, &ages, wall_ms())?
    } else {
        let mut connection = database::write(globals)?;
        pass(&mut connection, &ages, wall_ms(), &mut |gone, took| {
            progress.say(summary(gone));
            std::thread::sleep(took.max(PAUSE_MIN));
            true
        })?
    };
    drop(progress);
    if screen.is_json() {
        return Ok(screen.print_json(&in_json(&gone, args.dry_run))?);
    }
    let would = if args.dry_run { "would go: " } else { "" };
    Ok(screen.print(&format!("{would}{}", summary(&gone)))?)
}

fn summary(gone: &Gone) -> String {
    format!(
        "{} delivered and {} dead commands pruned, {} erased, {} events removed, {} ids forgotten",
        gone.delivered, gone.dead, gone.erased, gone.events, gone.forgotten
    )
}

fn in_json(gone: &Gone, dry_run: bool) -> Value {
    json!({
        "dry_run": dry_run,
        "delivered": gone.delivered,
        "dead": gone.dead,
        "erased": gone.erased,
        "events": gone.events,
        "forgotten": gone.forgotten,
    })
}
