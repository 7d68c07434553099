//! `fencepost why`: what a command waits for, or how it ended, in plain words, and what may be done.
//!
//! The rules give the reason and the database its facts; here are only the words and the command lines.
//! What isn't known is said: without the configuration nobody can tell whether a destination is served,
//! and of the past only what was recorded.

use fencepost::clock::wall_ms;
use fencepost::config::Config;
use fencepost::rules::{Because, Reason, Served, Then, explain, then};
use fencepost::sqlite::inspect::{Attempt, AuditEntry, Listed};
use fencepost::sqlite::pause::Pause;
use fencepost::sqlite::why::{self, Facts, Past};
use serde_json::{Value, json};

use crate::exit::{Exit, Failure};
use crate::inspect::{attempt_json, brief, command_json, is_configured, place, section, shown, to};
use crate::output::{Moment, Screen, Tone, clean, moment, parse_moment, relative, span};
use crate::{Globals, database};

/// Options of `fencepost why`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["id", "scope"]))]
pub(crate) struct Args {
    /// The command
    id: Option<String>,
    /// Instead of a command: what the lanes of this scope wait for
    #[arg(long, value_name = "SCOPE")]
    scope: Option<String>,
    /// Only the lane of this name; '' is the one without a name
    #[arg(long, value_name = "LANE", requires = "scope")]
    lane: Option<String>,
    /// Answer for a past moment (-5m, 2026-03-01T10:00), from attempts, feed and audit
    #[arg(long, value_name = "TIME", value_parser = parse_past, conflicts_with = "scope", allow_hyphen_values = true)]
    at: Option<Moment>,
}

/// `-5m` is five minutes ago; everything else as for other times.
fn parse_past(text: &str) -> Result<Moment, String> {
    match text.strip_prefix('-') {
        Some(ago) => match parse_moment(&format!("+{ago}"))? {
            Moment::In(ago) => {
                let ago_ms = i64::try_from(ago.as_millis()).unwrap_or(i64::MAX);
                Ok(Moment::At(wall_ms().saturating_sub(ago_ms)))
            }
            at @ Moment::At(_) => Ok(at),
        },
        None => parse_moment(text),
    }
}

/// One answer: a word for programs, sentences for people, and what may be done.
#[derive(Debug)]
struct Answer {
    because: &'static str,
    says: Vec<String>,
    /// Command lines, and what each does.
    may: Vec<(String, &'static str)>,
}

impl Answer {
    fn new(because: &'static str, says: impl Into<String>) -> Self {
        Self { because, says: vec![says.into()], may: Vec::new() }
    }

    fn and(mut self, says: impl Into<String>) -> Self {
        self.says.push(says.into());
        self
    }

    fn may(mut self, line: impl Into<String>, does: &'static str) -> Self {
        self.may.push((line.into(), does));
        self
    }
}

/// Says why.
pub(crate) fn why(args: &Args, globals: &Globals) -> anyhow::Result<()> {
    let connection = database::read(globals)?;
    let config = database::known_destinations(globals);
    let (screen, now_ms) = (globals.screen(), wall_ms());
    if let Some(scope) = &args.scope {
        let heads = why::heads(&connection, scope, args.lane.as_deref(), now_ms)?.ok_or_else(|| no_scope(scope))?;
        let asked = Asked { config: config.as_ref(), now_ms };
        return Ok(say_heads(screen, scope, &heads, &asked)?);
    }
    let id = args.id.as_deref().unwrap_or_default();
    let Some(facts) = why::facts(&connection, id, now_ms)? else {
        return say_unknown(screen, id, why::used(&connection, id)?.as_ref(), now_ms);
    };
    let at_ms = args.at.map(|at| at.at_ms(now_ms));
    let asked = Asked { config: config.as_ref(), now_ms };
    match at_ms {
        Some(at_ms) if at_ms > now_ms => Err(Failure::usage("--at is for the past").into()),
        Some(at_ms) => {
            let past = why::past(&connection, &facts.detail, at_ms)?;
            let answer = asked.then(&facts, &past, at_ms);
            Ok(say(screen, &facts, &answer, None, Some(at_ms))?)
        }
        None => {
            let answer = asked.answer(&facts);
            let head = facts.detail.head.as_ref().map(|head| why::facts(&connection, &head.id, now_ms)).transpose()?;
            let head = head.flatten().map(|head| (asked.answer(&head), head));
            Ok(say(screen, &facts, &answer, head.as_ref(), None)?)
        }
    }
}

fn no_scope(scope: &str) -> Failure {
    let message = format!("nothing was ever written for the scope {}", clean(scope));
    Failure::new(Exit::Data, message).hint("`fencepost lease show` lists scopes")
}

/// An id that nobody knows is an error; one that was pruned is an answer.
fn say_unknown(screen: Screen, id: &str, used: Option<&why::Used>, now_ms: i64) -> anyhow::Result<()> {
    let Some(used) = used else {
        let hint = "it was never committed, was refused, or was forgotten after prune; `fencepost list` shows ids";
        let message = format!("there is no command with the id {}", clean(id));
        return Err(Failure::new(Exit::Data, message).hint(hint).into());
    };
    if screen.is_json() {
        screen.print_json(
            &json!({ "id": id, "because": "pruned", "scope": used.scope, "remembered_until_ms": used.until_ms }),
        )?;
        return Ok(());
    }
    screen.print(&format!(
        "{} was a command of {}: it ended and was pruned. Its id is remembered until {}, so that it is never used again; \
         how it ended is not known any more.",
        clean(id),
        clean(&used.scope),
        moment(used.until_ms, now_ms)
    ))?;
    Ok(())
}

/// What is asked with: the configuration, where one is given, and the time.
struct Asked<'a> {
    config: Option<&'a Config>,
    now_ms: i64,
}

impl Asked<'_> {
    fn served(&self, command: &Listed) -> Served {
        match self.config {
            None => Served::NotKnown,
            Some(config) if is_configured(config, &command.kind, &command.destination) => Served::Yes,
            Some(_) if matches!(command.kind.as_str(), "webhook" | "email") => Served::NoDestination,
            Some(_) => Served::NoKind,
        }
    }

    fn because(&self, facts: &Facts) -> Because {
        let mut standing = facts.standing;
        standing.served = self.served(&facts.detail.command);
        // One that can't be served holds nobody up.
        let serves = |suspect: &Listed| !matches!(self.served(suspect), Served::NoDestination | Served::NoKind);
        standing.behind_suspect = facts.suspect.as_ref().is_some_and(serves);
        explain(&standing, self.now_ms, true)
    }

    fn answer(&self, facts: &Facts) -> Answer {
        let command = &facts.detail.command;
        let id = clean(&command.id);
        match self.because(facts) {
            Because::Delivered => self.delivered(facts),
            Because::Ended(reason) => self.ended(facts, reason),
            Because::Sending { armed } => self.sending(facts, armed),
            Because::InDoubt => self.in_doubt(facts),
            Because::Parked(reason) => self.parked(facts, reason),
            Because::Behind => self.behind(facts),
            Because::Ends(Reason::Expired) => {
                let over = command.expires_at_ms.map(|at_ms| relative(at_ms, self.now_ms)).unwrap_or_default();
                Answer::new(
                    "expires",
                    format!(
                        "its time was over {over}: it ends as expired at the dispatcher's next look, if its clock has been steady for a minute"
                    ),
                )
            }
            Because::Ends(Reason::Invalid) => {
                let kind = clean(&command.kind);
                Answer::new(
                    "ends_invalid",
                    format!("no sender here knows the kind {kind}: it ends as invalid at the next look"),
                )
            }
            Because::Ends(_) => Answer::new(
                "ends_fenced",
                "something newer was begun in its lane, so it may never be sent: it ends as fenced at the next look",
            ),
            Because::ClockUnsteady => Answer::new(
                "clock_unsteady",
                "its time is over, but the clock jumped: it waits until the clock was steady for a minute",
            ),
            Because::NotDue => self.not_due(facts),
            Because::Paused => self.paused(facts),
            Because::NoDestination => {
                let to = to(command);
                let since = moment(command.due_ms.unwrap_or(command.inserted_ms), self.now_ms);
                Answer::new(
                    "unknown_destination",
                    format!("the configuration doesn't name {to}: it waits since {since}, without a try"),
                )
                .and(format!("add {} to it and restart the daemon", section(&command.kind, &command.destination)))
                .may("fencepost config check", "says whether the daemon takes the new configuration")
                .may(format!("fencepost cancel {id} --reason TEXT"), "ends it without sending it")
            }
            Because::Alone => Answer::new(
                "alone",
                "two starts in a row found it open, so it may be what kills the process: it is sent alone",
            )
            .and(format!("it waits until what is in flight has ended: {} now", attempts_in_flight(facts.in_flight)))
            .may(format!("fencepost cancel {id} --reason TEXT"), "ends it without sending it again"),
            Because::BehindSuspect => self.behind_suspect(facts),
            Because::Due => self.due(facts),
        }
    }

    fn delivered(&self, facts: &Facts) -> Answer {
        let command = &facts.detail.command;
        let when = moment(command.updated_ms, self.now_ms);
        let by = facts.detail.attempts.iter().rfind(|attempt| attempt.outcome.as_deref() == Some("delivered"));
        let says = match by {
            Some(attempt) => {
                format!("the destination has it since {when}: attempt {} of {}", attempt.attempt_no, command.attempt_no)
            }
            None => format!("it counts as delivered since {when}, by a person's answer"),
        };
        let answer = Answer::new("delivered", says);
        match by {
            Some(attempt) => answer.and(format!("what was seen: {}", brief(attempt))),
            None => with_audit(answer, facts, self.now_ms),
        }
    }

    fn ended(&self, facts: &Facts, reason: Reason) -> Answer {
        let command = &facts.detail.command;
        let when = moment(command.updated_ms, self.now_ms);
        let says = match reason {
            Reason::Fenced => "something newer was begun in its lane, so it may never be sent",
            Reason::Refused => "the destination said no for good",
            Reason::Exhausted => "it had no tries, or no time, left",
            Reason::Invalid => "its content can't be sent",
            Reason::Superseded => "a newer holder took its scope over, and older commands are discarded then",
            Reason::Cancelled => "its holder or an operator cancelled it",
            Reason::Expired => "its time was over",
            Reason::Abandoned => "nobody could find out whether it happened, and a person gave it up",
        };
        let mut answer = Answer::new("dead", format!("it ended {when} as {}: {says}", reason.as_str()));
        if let Some(why) = &facts.why {
            answer = answer.and(format!("what the first look found: {}", clean(why)));
        }
        answer = with_last(answer, facts, self.now_ms);
        answer = with_audit(answer, facts, self.now_ms);
        let effect = match command.effect.as_str() {
            "none" => "certainly nothing happened outside, and it will not be sent any more",
            _ => "something may have happened outside; it will not be sent any more",
        };
        let answer = answer.and(effect);
        if reason == Reason::Invalid {
            return answer.and("the same content would end the same way: have its writer insert it anew, mended");
        }
        answer.may(
            format!("fencepost reissue {} --reason TEXT", clean(&command.id)),
            "makes a new command from it, if it is still wanted",
        )
    }

    fn sending(&self, facts: &Facts, armed: bool) -> Answer {
        let (reign, command) = (&facts.reign, &facts.detail.command);
        let Some(attempt) = facts.detail.attempts.iter().rfind(|attempt| attempt.settled_ms.is_none()) else {
            return Answer::new("sending", "it counts as being sent, and no attempt is open: the database is damaged")
                .may("fencepost audit", "finds what else is");
        };
        let since = moment(attempt.begun_ms, self.now_ms);
        let host = clean(reign.host.as_deref().unwrap_or("an unknown host"));
        let pid = reign.pid.map(|pid| format!("process {pid} on {host}")).unwrap_or(host);
        let answer = Answer::new("sending", format!("attempt {} is open since {since}, by {pid}", attempt.attempt_no));
        if armed {
            let then = match attempt.on_unknown.as_str() {
                "resend" => "sent again",
                _ => "in doubt",
            };
            return answer
                .and(format!(
                    "it may have had its effect already; if that process died, the next start finds it {then}"
                ))
                .may("fencepost doctor", "says whether a dispatcher runs, and who stops it");
        }
        answer
            .and("it has sent nothing yet that could have an effect; if that process died, the next start sends it again")
            .may(format!("fencepost cancel {} --reason TEXT", clean(&command.id)), "ends it, as long as it has sent nothing")
            .may("fencepost doctor", "says whether a dispatcher runs, and who stops it")
    }

    fn in_doubt(&self, facts: &Facts) -> Answer {
        let command = &facts.detail.command;
        let (id, since) = (clean(&command.id), moment(command.updated_ms, self.now_ms));
        let answer =
            Answer::new("in_doubt", format!("nobody knows whether it happened, since {since}, and its lane waits"));
        with_last(answer, facts, self.now_ms)
            .and("find out at the destination (it saw this id, if it saw anything), then say so:")
            .may(format!("fencepost resolve {id} delivered --reason TEXT"), "it happened; the lane goes on")
            .may(
                format!("fencepost resolve {id} not-delivered --reason TEXT"),
                "it didn't; it is sent again under the same id",
            )
            .may(
                format!("fencepost resolve {id} given-up --reason TEXT"),
                "nobody will find out; it is never sent again",
            )
    }

    fn parked(&self, facts: &Facts, reason: Option<Reason>) -> Answer {
        let (command, watermark) = (&facts.detail.command, facts.detail.watermark);
        let (id, since) = (clean(&command.id), moment(command.updated_ms, self.now_ms));
        let answer = match reason {
            None => Answer::new("parked_review", format!("it waits for a verdict since {since}"))
                .and(format!(
                    "a newer holder with token {watermark} took the scope over; this one was accepted under token {}, and on_takeover = review",
                    command.token
                )),
            Some(reason) => {
                let why = if reason == Reason::Refused { "the destination refused it" } else { "it had no tries, or no time, left" };
                let says = format!("{why}, and on_dead = block halts its lane since {since}");
                with_last(Answer::new("parked_block", says), facts, self.now_ms)
            }
        };
        answer
            .may(format!("fencepost adopt {id} --reason TEXT"), "sends it after all, with fresh tries")
            .may(format!("fencepost discard {id} --reason TEXT"), "ends it; the lane goes on")
    }

    fn behind(&self, facts: &Facts) -> Answer {
        let id = clean(&facts.detail.command.id);
        let Some(head) = &facts.detail.head else {
            return Answer::new("behind", "an older command of its lane is live");
        };
        let ahead = facts.detail.ahead.unwrap_or(1);
        let more = if ahead > 1 { format!(", and {} more between them", ahead - 1) } else { String::new() };
        let due = head.due_ms.map(|due_ms| format!(", due {}", moment(due_ms, self.now_ms))).unwrap_or_default();
        let age = span(self.now_ms.saturating_sub(head.updated_ms));
        let says = format!(
            "it waits behind {} ({}, {} for {age}{due}){more}: order is kept in a lane",
            clean(&head.id),
            to(head),
            clean(&head.state)
        );
        let head_id = clean(&head.id);
        let of_head = match head.state.as_str() {
            "pending" | "parked" => {
                (format!("fencepost cancel {head_id} --reason TEXT"), "ends the head, if it is not wanted any more")
            }
            _ => (format!("fencepost why {head_id}"), "says what the head waits for; it can't be cancelled now"),
        };
        Answer::new("behind", says).may(of_head.0, of_head.1).may(
            format!("fencepost cancel {id} --reason TEXT"),
            "ends this one; a lane of its own would not have waited",
        )
    }

    fn not_due(&self, facts: &Facts) -> Answer {
        let command = &facts.detail.command;
        let due = command.due_ms.map(|due_ms| moment(due_ms, self.now_ms)).unwrap_or_default();
        let id = clean(&command.id);
        let cancel = (format!("fencepost cancel {id} --reason TEXT"), "ends it without sending it");
        let answer = match facts.detail.attempts.last() {
            Some(_) => with_last(Answer::new("back_off", format!("it is tried again {due}")), facts, self.now_ms)
                .and(format!("{} tries count so far", command.tries)),
            None => Answer::new("not_before", format!("its writer wanted it sent at the earliest {due}")),
        };
        answer.may(cancel.0, cancel.1)
    }

    fn paused(&self, facts: &Facts) -> Answer {
        let mut answer = Answer::new("paused", "it is due and would be sent, but it is paused");
        for pause in &facts.pauses {
            let until = pause
                .until_ms
                .map_or("until it is resumed".to_owned(), |at_ms| format!("until {}", moment(at_ms, self.now_ms)));
            let (who, reason) = (clean(&pause.who), clean(&pause.reason));
            let since = moment(pause.at_ms, self.now_ms);
            answer = answer
                .and(format!("{who} paused {} {since}, {until}, because: {reason}", paused_what(pause)))
                .may(resume_line(pause), "lets it go on");
        }
        answer
    }

    fn behind_suspect(&self, facts: &Facts) -> Answer {
        let suspect = facts.suspect.as_ref().map(|suspect| clean(&suspect.id)).unwrap_or_default();
        let says =
            format!("it waits for {suspect}, which two starts in a row found open and which therefore goes alone");
        Answer::new("behind_suspect", says)
            .may(format!("fencepost why {suspect}"), "says what that one waits for")
            .may(format!("fencepost cancel {suspect} --reason TEXT"), "ends that one")
    }

    fn due(&self, facts: &Facts) -> Answer {
        let command = &facts.detail.command;
        let since = moment(command.due_ms.unwrap_or(command.inserted_ms), self.now_ms);
        let answer = Answer::new("due", format!("nothing stands in its way: it is due since {since}"));
        let answer = with_last(answer, facts, self.now_ms)
            .and("it goes out at the dispatcher's next look, when its destination has a free place");
        let answer = match self.config {
            Some(_) => answer,
            None => answer.and("whether its destination is configured is not known here: give --config"),
        };
        answer.may("fencepost doctor", "says whether a dispatcher runs, and what stops it")
    }

    /// What can be said of an earlier moment.
    fn then(&self, facts: &Facts, past: &Past, at_ms: i64) -> Answer {
        let mut answer = self.stood(facts, past, at_ms);
        for entry in facts.detail.audit.iter().filter(|entry| entry.at_ms <= at_ms) {
            answer = answer.and(audited(entry, self.now_ms));
        }
        if let Some(token) = past.token_at_least {
            answer = answer.and(format!(
                "its scope had accepted token {token} by then, or a greater one; this command has {}",
                facts.detail.command.token
            ));
        }
        if past.feed_is_cut {
            answer = answer.and("the feed was cut at its front: doubts and verdicts before that are not known");
        }
        answer
    }

    /// Where it stood then.
    fn stood(&self, facts: &Facts, past: &Past, at_ms: i64) -> Answer {
        let command = &facts.detail.command;
        let moment = |ms: i64| moment(ms, self.now_ms);
        let attempts = &facts.detail.attempts;
        match then(at_ms, command.inserted_ms, &past.attempts, &past.changes) {
            Then::NotYet => {
                Answer::new("not_yet", format!("it had not been inserted: that was {}", moment(command.inserted_ms)))
            }
            Then::Waiting { after } => {
                let mut answer = Answer::new("waited", "it waited");
                if let Some(attempt) = after.and_then(|at| attempts.get(at)) {
                    answer = answer.and(format!("attempt {} had ended: {}", attempt.attempt_no, brief(attempt)));
                }
                match (&past.ahead, attempts.iter().find(|attempt| attempt.begun_ms > at_ms)) {
                    (Some(ahead), _) => answer.and(format!("{} went before it in its lane", clean(&ahead.id))),
                    (None, Some(next)) => answer.and(format!(
                        "it was the head of its lane, and attempt {} began {}",
                        next.attempt_no,
                        moment(next.begun_ms)
                    )),
                    (None, None) => answer.and("it was the head of its lane"),
                }
                .and("not recorded: when it was due then, what was paused, and what the configuration named")
            }
            Then::Sending { attempt, armed } => {
                let Some(attempt) = attempts.get(attempt) else { return Answer::new("sending", "it was being sent") };
                let armed = if armed {
                    "it may have had its effect"
                } else {
                    "it had sent nothing yet that could have an effect"
                };
                let ended = attempt.settled_ms.map_or("is still open".to_owned(), |end_ms| {
                    format!("ended {}: {}", moment(end_ms), brief(attempt))
                });
                Answer::new(
                    "sending",
                    format!("attempt {} was open since {}: {armed}", attempt.attempt_no, moment(attempt.begun_ms)),
                )
                .and(format!("it {ended}"))
            }
            Then::InDoubt => Answer::new("in_doubt", "nobody knew whether it had happened"),
            Then::Parked => Answer::new("parked", "it was parked, and waited for a verdict"),
            Then::Delivered => {
                Answer::new("delivered", format!("it had been delivered: {}", moment(command.updated_ms)))
            }
            Then::Dead => Answer::new(
                "dead",
                format!(
                    "it had ended as {}: {}",
                    clean(command.reason.as_deref().unwrap_or("dead")),
                    moment(command.updated_ms)
                ),
            ),
        }
    }
}

fn attempts_in_flight(count: i64) -> String {
    if count == 1 { "1 attempt".to_owned() } else { format!("{count} attempts") }
}

/// The last attempt and what was seen.
fn with_last(answer: Answer, facts: &Facts, now_ms: i64) -> Answer {
    let Some(Attempt { attempt_no, begun_ms, .. }) = facts.detail.attempts.last() else { return answer };
    let seen = facts.detail.attempts.last().map(brief).unwrap_or_default();
    answer.and(format!("attempt {attempt_no}, begun {}, ended {seen}", moment(*begun_ms, now_ms)))
}

fn with_audit(mut answer: Answer, facts: &Facts, now_ms: i64) -> Answer {
    for entry in &facts.detail.audit {
        answer = answer.and(audited(entry, now_ms));
    }
    answer
}

fn audited(entry: &AuditEntry, now_ms: i64) -> String {
    let (who, verb, reason) = (clean(&entry.who), clean(&entry.verb), clean(&entry.reason));
    format!("{who}, {}: {verb}, because: {reason}", moment(entry.at_ms, now_ms))
}

fn paused_what(pause: &Pause) -> String {
    let parts = [("kind", &pause.kind), ("destination", &pause.destination), ("scope", &pause.scope)];
    let named: Vec<String> = parts
        .iter()
        .filter(|(_, name)| !name.is_empty())
        .map(|(what, name)| format!("{what} {}", clean(&shown(name))))
        .collect();
    if named.is_empty() { "everything".to_owned() } else { named.join(", ") }
}

fn resume_line(pause: &Pause) -> String {
    let what = match (pause.destination.as_str(), pause.scope.as_str()) {
        ("", "") => "--all".to_owned(),
        ("", scope) => format!("--scope '{}'", clean(scope)),
        (destination, _) => format!("--destination '{}/{}'", clean(&pause.kind), clean(&shown(destination))),
    };
    format!("fencepost resume {what} --reason TEXT")
}

// ── Saying it ───────────────────────────────────────────────────────────────────────────────────────

fn say(
    screen: Screen,
    facts: &Facts,
    answer: &Answer,
    head: Option<&(Answer, Facts)>,
    at_ms: Option<i64>,
) -> std::io::Result<()> {
    if screen.is_json() {
        let mut value = answer_json(facts, answer);
        value["at_ms"] = at_ms.into();
        value["head"] = head.map_or(Value::Null, |(answer, facts)| answer_json(facts, answer));
        return screen.print_json(&value);
    }
    let mut parts = vec![answer_text(screen, facts, answer, at_ms.is_none())];
    if let Some((answer, facts)) = head {
        parts.push(screen.heading("What the head of its lane waits for"));
        parts.push(answer_text(screen, facts, answer, true));
    }
    screen.print(&parts.join("\n"))
}

fn say_heads(screen: Screen, scope: &str, heads: &[Facts], asked: &Asked<'_>) -> std::io::Result<()> {
    if screen.is_json() {
        return screen.print_json(&heads.iter().map(|facts| answer_json(facts, &asked.answer(facts))).collect());
    }
    if heads.is_empty() {
        return screen.print(&format!("nothing waits in {}", clean(scope)));
    }
    let text = |facts: &Facts| {
        let lane = screen.heading(&place(&facts.detail.command));
        format!("{}\n{}", lane.trim_start_matches('\n'), answer_text(screen, facts, &asked.answer(facts), true))
    };
    screen.print(&heads.iter().map(text).collect::<Vec<_>>().join("\n\n"))
}

fn answer_text(screen: Screen, facts: &Facts, answer: &Answer, with_state: bool) -> String {
    let command = &facts.detail.command;
    let state =
        if with_state { screen.paint(Tone::of_state(&command.state), &command.state) } else { "then".to_owned() };
    let head = format!("{} to {} in {}: {state}", clean(&command.id), to(command), place(command));
    let mut lines = vec![head];
    lines.extend(answer.says.iter().map(|says| format!("  {says}")));
    lines.extend(
        answer
            .may
            .iter()
            .map(|(line, does)| format!("    {line}   {}", screen.paint(Tone::Quiet, &format!("# {does}")))),
    );
    lines.join("\n")
}

fn answer_json(facts: &Facts, answer: &Answer) -> Value {
    let mut value = command_json(&facts.detail.command);
    value["because"] = answer.because.into();
    value["says"] = answer.says.clone().into();
    value["may"] = answer.may.iter().map(|(line, does)| json!({ "run": line, "does": does })).collect();
    value["why"] = facts.why.clone().into();
    value["attempts"] = facts.detail.attempts.iter().map(attempt_json).collect();
    value
}
