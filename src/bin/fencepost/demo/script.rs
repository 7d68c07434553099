//! Who asks for what in the demo, and what is claimed to become of it.
//!
//! The workers play from this script and the comparison at the end is held against it, so that the
//! two can't drift apart. It must never be used to say what happened: that is read from the database
//! and from the receivers.

use fencepost::rules::OnUnknown;

/// What all four workers lease, one after the other.
pub(super) const SCOPE: &str = "order/17";

/// One worker: its booking and its commands, in one transaction.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) worker: &'static str,
    /// The fencing token that its acquisition must get.
    pub(super) token: i64,
    /// What it writes into the shop's own table.
    pub(super) books: &'static str,
    /// Whether the whole transaction must be refused.
    pub(super) refused: bool,
    pub(super) asks: &'static [Ask],
}

/// One command.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    /// Also the command's id, so that a reader meets the same word everywhere.
    pub(super) id: &'static str,
    pub(super) lane: Lane,
    /// The subject of a mail, the event of a webhook.
    pub(super) says: &'static str,
    pub(super) fate: Fate,
}

/// A line of commands in which order is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    Hooks,
    Mails,
}

/// What must become of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// Arrives once.
    Delivered,
    /// Arrives twice, as the same id and bytes, because its first attempt was cut off.
    Resent,
    /// Arrives once, is in doubt because its attempt was cut off, and a person answers.
    Answered,
    /// Never reaches the outbox.
    Refused,
}

impl Lane {
    pub(super) const ALL: [Self; 2] = [Self::Hooks, Self::Mails];

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Hooks => "hooks",
            Self::Mails => "mails",
        }
    }

    /// What the configuration says for the destination of this lane.
    pub(super) const fn on_unknown(self) -> OnUnknown {
        match self {
            Self::Hooks => OnUnknown::Resend,
            Self::Mails => OnUnknown::Hold,
        }
    }
}

const fn hook(id: &'static str, event: &'static str, fate: Fate) -> Ask {
    Ask { id, lane: Lane::Hooks, says: event, fate }
}

const fn mail(id: &'static str, subject: &'static str, fate: Fate) -> Ask {
    Ask { id, lane: Lane::Mails, says: subject, fate }
}

pub(super) const A: Part = Part {
    worker: "A",
    token: 1,
    books: "paid",
    refused: false,
    asks: &[hook("hook-paid", "paid", Fate::Delivered), mail("mail-thanks", "Thank you for order 17", Fate::Delivered)],
};

pub(super) const B: Part = Part {
    worker: "B",
    token: 2,
    books: "cancelled",
    refused: true,
    asks: &[mail("mail-cancelled", "Order 17 is cancelled", Fate::Refused)],
};

pub(super) const C: Part = Part {
    worker: "C",
    token: 3,
    books: "shipped",
    refused: false,
    asks: &[hook("hook-shipped", "shipped", Fate::Delivered)],
};

pub(super) const D: Part = Part {
    worker: "D",
    token: 4,
    books: "invoiced",
    refused: false,
    asks: &[
        hook("hook-invoice", "invoiced", Fate::Resent),
        mail("mail-invoice", "Invoice for order 17", Fate::Answered),
        hook("hook-closed", "closed", Fate::Delivered),
        mail("mail-survey", "How did we do?", Fate::Delivered),
    ],
};

pub(super) const PARTS: [Part; 4] = [A, B, C, D];

/// Every command of the script, by seq: workers in order, each with its commands in order.
pub(super) fn asks() -> impl Iterator<Item = (&'static Part, &'static Ask)> {
    static ALL: [Part; 4] = PARTS;
    ALL.iter().flat_map(|part| part.asks.iter().map(move |ask| (part, ask)))
}

/// The commands of one fate, as ids.
pub(super) fn ids(fate: Fate) -> Vec<&'static str> {
    asks().filter(|(_, ask)| ask.fate == fate).map(|(_, ask)| ask.id).collect()
}
