//! The four acts of the demo, in order, each in the words that a newcomer reads while it happens.
//!
//! An act waits for what it tells and fails if that doesn't come. It collects what only that moment
//! can show (the refused worker's words, the attempts that a dead dispatcher left open); the rest is
//! read at the end, when nothing moves any more.

use std::os::unix::process::ExitStatusExt;

use anyhow::{Context, bail, ensure};
use fencepost::clock;
use fencepost::rules::Answer;
use fencepost::sqlite::inspect;
use fencepost::sqlite::resolve::{Resolution, resolve};
use rustix::process::Signal;

use super::business;
use super::claims::{Command, Cut, Doubt, Seen, Told};
use super::process::Process;
use super::screen::Screen;
use super::script::{A, B, C, D, Fate, Part, asks, ids};
use super::stage::Stage;
use super::worker::Said;

/// Long enough for anything but a worker that is stopped.
const LONG_TTL_MS: u64 = 30_000;

/// Short, because the demo waits until it is over.
const SHORT_TTL_MS: u64 = 1_000;

const REASON: &str = "I have seen it";

/// Plays everything, and returns what was seen.
pub(super) async fn play(stage: &mut Stage, screen: Screen) -> anyhow::Result<Seen> {
    let dispatcher = stage.dispatcher().await?;
    regular(stage, screen).await?;
    let told = stopped_worker(stage, screen).await?;
    let (dispatcher, cut, doubt) = killed_dispatcher(stage, screen, dispatcher).await?;
    answer(stage, screen).await?;
    stage.dismiss(dispatcher).await?;
    look(stage, told, cut, doubt).await
}

async fn regular(stage: &Stage, screen: Screen) -> anyhow::Result<()> {
    screen.act(1, "A worker writes, Fencepost sends")?;
    screen.say(
        "Worker A takes a lease on order 17: for a while only A may act for it. With each lease comes a \
         larger number, the fencing token; A's is 1. In one database transaction A books \"paid\" and \
         writes a webhook and a mail into the outbox, a table beside its own. A sends nothing itself: what \
         was committed, Fencepost's dispatcher sends.",
    )?;
    work(stage, &A).await?;
    stage.until_state(&["hook-paid", "mail-thanks"], "delivered").await?;
    let arrived = stage.arrived("hook-paid").await?.len() == 1 && stage.arrived("mail-thanks").await?.len() == 1;
    screen.fact(arrived, "the booking is committed; hook-paid and mail-thanks arrived, once each")?;
    Ok(())
}

async fn stopped_worker(stage: &Stage, screen: Screen) -> anyhow::Result<Told> {
    screen.act(2, "A worker is stopped, replaced, and wakes up")?;
    screen.say(
        "Worker B takes the lease for one second: token 2. Before it begins its transaction we stop its \
         process (SIGSTOP), as a suspended machine would. The second passes. Worker C takes over with \
         token 3 and books \"shipped\". Then B wakes up, knows of nothing, and goes on: it books \
         \"cancelled\" and writes a mail that tells the customer so.",
    )?;
    let mut worker = stage.worker(B.worker, SHORT_TTL_MS, true)?;
    let (token, until_ms) = acquired(&mut worker).await?;
    worker.stop().await?;
    // The line that it waits for is there from now on; only the stop keeps it from going on.
    worker.nudge().await?;
    work(stage, &C).await?;
    stage.until_state(&["hook-shipped"], "delivered").await?;
    let too_late = clock::wall_ms() > until_ms;
    worker.signal(Signal::CONT)?;
    let told = Told { token, too_late, ..refused(&mut worker).await? };
    screen.quote(&format!("B had written {} row; then its mail got this answer:", told.rows_inside))?;
    screen.quote(&told.text)?;
    let undone = told.rows_left == 0 && stage.command("mail-cancelled")?.is_none();
    screen.fact(
        undone,
        "the database refused the older token and undid B's whole transaction: \"cancelled\" is gone and \
         nobody gets the mail. A mail server could not have checked that",
    )?;
    Ok(told)
}

async fn killed_dispatcher(
    stage: &Stage,
    screen: Screen,
    dispatcher: Process,
) -> anyhow::Result<(Process, Cut, Doubt)> {
    screen.act(3, "The dispatcher is killed at the worst moment")?;
    screen.say(
        "Worker D, token 4, writes two webhooks and two mails. Each kind has a lane of its own, in which \
         order is kept. The receivers take the first of each, and before they answer we kill the dispatcher (SIGKILL). On disk it says \"about to send\", no more: \
         from this side nobody can know whether they arrived.",
    )?;
    let (open, held) = (ids(Fate::Resent), ids(Fate::Answered));
    stage.receivers.hold(true).await?;
    work(stage, &D).await?;
    stage.until_arrived(&[open.clone(), held.clone()].concat()).await?;
    let cut = kill(stage, dispatcher).await?;
    stage.receivers.hold(false).await?;
    screen.say(
        "A new dispatcher starts and does what is set for each destination. The webhooks' receiver can drop \
         a repeat, so it is set to \"resend\": the same id, the same bytes. A mail server would not notice \
         a repeat, so it is set to \"hold\": in doubt until a person answers.",
    )?;
    let dispatcher = stage.dispatcher().await?;
    stage.until_state(&open, "delivered").await?;
    stage.until_state(&["hook-closed"], "delivered").await?;
    stage.until_state(&held, "in_doubt").await?;
    let doubt = doubt(stage).await?;
    let hooks = stage.arrived("hook-invoice").await?;
    let same = matches!(&hooks[..], [one, other] if one.bytes == other.bytes);
    screen.fact(same, "hook-invoice arrived twice, byte for byte the same; hook-closed after it")?;
    let waits = doubt.arrived == [1] && doubt.waiting == ["mail-survey"];
    screen.fact(waits, "mail-invoice is in doubt, not sent again; mail-survey waits behind it")?;
    Ok((dispatcher, cut, doubt))
}

async fn answer(stage: &mut Stage, screen: Screen) -> anyhow::Result<()> {
    screen.act(4, "A person answers")?;
    screen.say("Somebody finds the invoice in the mailbox and says so, as with this command:")?;
    for id in ids(Fate::Answered) {
        let resolution =
            Resolution { id, answer: Answer::Delivered, who: "demo", reason: REASON, now_ms: clock::wall_ms() };
        resolve(&mut stage.connection, &resolution)?;
        screen.quote(&format!("fencepost resolve {id} delivered --reason \"{REASON}\""))?;
    }
    stage.until_state(&["mail-survey"], "delivered").await?;
    let arrived = stage.arrived("mail-survey").await?.len() == 1;
    screen.fact(arrived, "the mails go on: mail-survey arrived")?;
    Ok(())
}

/// Lets a worker play its part to a good end.
async fn work(stage: &Stage, part: &Part) -> anyhow::Result<()> {
    let mut worker = stage.worker(part.worker, LONG_TTL_MS, false)?;
    acquired(&mut worker).await?;
    loop {
        match hear(&mut worker).await? {
            Said::Begun | Said::Booked { .. } => {}
            Said::Committed => break,
            other @ (Said::Acquired { .. } | Said::Refused { .. }) => bail!("worker {} said {other:?}", part.worker),
        }
    }
    let status = worker.ended().await?;
    ensure!(status.success(), "worker {} ended with {status}", part.worker);
    Ok(())
}

async fn hear(worker: &mut Process) -> anyhow::Result<Said> {
    serde_json::from_str(&worker.line().await?).context("what a worker said")
}

async fn acquired(worker: &mut Process) -> anyhow::Result<(i64, i64)> {
    match hear(worker).await? {
        Said::Acquired { token, until_ms } => Ok((token, until_ms)),
        other @ (Said::Begun | Said::Booked { .. } | Said::Committed | Said::Refused { .. }) => {
            bail!("instead of its lease a worker said {other:?}")
        }
    }
}

/// Listens to a worker that must be refused. One that isn't has its words compared all the same.
async fn refused(worker: &mut Process) -> anyhow::Result<Told> {
    let mut told = Told::default();
    loop {
        match hear(worker).await? {
            Said::Begun => {}
            Said::Booked { rows } => told.rows_inside = rows,
            Said::Refused { text, rows_left } => return Ok(Told { text, rows_left, ..told }),
            Said::Committed => return Ok(Told { text: "nothing: it could commit".to_owned(), ..told }),
            other @ Said::Acquired { .. } => bail!("a worker said {other:?} twice"),
        }
    }
}

/// Kills the dispatcher and looks at what it left behind, before anything can change it.
async fn kill(stage: &Stage, mut dispatcher: Process) -> anyhow::Result<Cut> {
    dispatcher.signal(Signal::KILL)?;
    let status = dispatcher.ended().await?;
    let mut open = Vec::new();
    for (_, ask) in asks() {
        let detail = stage.command(ask.id)?;
        let last = detail.as_ref().and_then(|detail| detail.attempts.last());
        if last.is_some_and(|attempt| attempt.armed_ms.is_some() && attempt.settled_ms.is_none()) {
            open.push(ask.id.to_owned());
        }
    }
    let arrivals = stage.receivers.arrivals().await?;
    let arrived = arrivals.into_iter().map(|arrival| arrival.id).filter(|id| open.contains(id)).collect();
    Ok(Cut { signal: status.signal(), open, arrived })
}

async fn doubt(stage: &Stage) -> anyhow::Result<Doubt> {
    let arrivals = stage.receivers.arrivals().await?;
    let mut doubt = Doubt::default();
    for (_, ask) in asks() {
        let Some(detail) = stage.command(ask.id)? else { continue };
        match detail.command.state.as_str() {
            "in_doubt" => {
                doubt.in_doubt.push(ask.id.to_owned());
                doubt.arrived.push(arrivals.iter().filter(|arrival| arrival.id == ask.id).count());
            }
            "pending" => doubt.waiting.push(ask.id.to_owned()),
            _ => {}
        }
    }
    Ok(doubt)
}

/// Reads everything at the end.
async fn look(stage: &Stage, told: Told, cut: Cut, doubt: Doubt) -> anyhow::Result<Seen> {
    let filter = inspect::Filter { limit: 1_000, ..inspect::Filter::default() };
    let mut commands = Vec::new();
    for listed in inspect::list(&stage.connection, &filter)?.into_iter().rev() {
        let detail = stage.command(&listed.id)?.with_context(|| format!("{} is gone", listed.id))?;
        commands.push(command(detail));
    }
    let status = inspect::status(&stage.connection, clock::wall_ms())?;
    Ok(Seen {
        bookings: business::bookings(&stage.connection)?,
        commands,
        arrivals: stage.receivers.arrivals().await?,
        told,
        counted: status.refusals.iter().map(|row| (row.token, row.watermark, row.count)).collect(),
        cut,
        doubt,
    })
}

fn command(detail: inspect::Detail) -> Command {
    let attempts = detail.attempts.into_iter();
    Command {
        id: detail.command.id,
        lane: detail.command.lane,
        token: detail.command.token,
        state: detail.command.state,
        attempts: attempts.map(|attempt| (attempt.epoch, attempt.outcome.unwrap_or_default())).collect(),
        answers: detail.audit.iter().filter(|entry| entry.verb == "resolve").count(),
    }
}
