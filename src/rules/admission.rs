//! Admission: may this token write into this scope, and what does the scope know afterwards?
//!
//! The database decides this in the worker's transaction (`schema.sql`); here stands the same rule as
//! a function, so that it can be modelled, and so that a test can hold the two against each other.

use super::{FencingToken, TOKEN_MAX};

/// The source of scopes whose tokens the built-in lease issues.
pub const LEASE: &str = "lease";

/// How far a later token of a foreign source may jump, unless the policy says otherwise: 2^40.
pub const MAX_JUMP_DEFAULT: i64 = 1 << 40;

/// The longest time to live of a lease: 31 days, in milliseconds.
pub const TTL_MS_MAX: i64 = 2_678_400_000;

/// A lease whose grant lies further in the future than this is free: the clock was set back.
const CLOCK_SLACK_MS: i64 = 5_000;

/// Why a statement of a worker is refused. The numbers are public and the same in every database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Code {
    /// FP001: the token is below the watermark.
    StaleToken,
    /// FP002: the token belongs to another holder.
    OtherHolder,
    /// FP003: an illegal value.
    IllegalValue,
    /// FP005: the id exists with other content.
    IdExists,
    /// FP006: a command is immutable.
    Immutable,
    /// FP007: the command is live.
    Live,
    /// FP008: a number may not fall.
    MayNotFall,
    /// FP009: the token was never sealed.
    NeverSealed,
    /// FP010: the key exists with other content.
    KeyExists,
    /// FP011: the command is final.
    Final,
    /// FP012: the token jumps too far.
    JumpsTooFar,
    /// FP013: the lease is held, or the scope is not of this kind.
    Held,
    /// FP014: the scope has another source of tokens.
    OtherSource,
}

impl Code {
    /// Every code, in the order of their numbers.
    pub const ALL: [Self; 13] = [
        Self::StaleToken,
        Self::OtherHolder,
        Self::IllegalValue,
        Self::IdExists,
        Self::Immutable,
        Self::Live,
        Self::MayNotFall,
        Self::NeverSealed,
        Self::KeyExists,
        Self::Final,
        Self::JumpsTooFar,
        Self::Held,
        Self::OtherSource,
    ];

    /// The code as it stands in the database's message, `FP001` and so on.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::StaleToken => "FP001",
            Self::OtherHolder => "FP002",
            Self::IllegalValue => "FP003",
            Self::IdExists => "FP005",
            Self::Immutable => "FP006",
            Self::Live => "FP007",
            Self::MayNotFall => "FP008",
            Self::NeverSealed => "FP009",
            Self::KeyExists => "FP010",
            Self::Final => "FP011",
            Self::JumpsTooFar => "FP012",
            Self::Held => "FP013",
            Self::OtherSource => "FP014",
        }
    }

    /// What the code means, in a few words.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::StaleToken => "stale token",
            Self::OtherHolder => "token belongs to another holder",
            Self::IllegalValue => "illegal value",
            Self::IdExists => "id exists with other content",
            Self::Immutable => "command is immutable",
            Self::Live => "command is live",
            Self::MayNotFall => "number may not fall",
            Self::NeverSealed => "token was never sealed",
            Self::KeyExists => "key exists with other content",
            Self::Final => "command is final",
            Self::JumpsTooFar => "token jumps too far",
            Self::Held => "lease is held, or not of this kind",
            Self::OtherSource => "other source",
        }
    }

    /// Finds the code in a database's message. Drivers put text before it, so it is searched for
    /// anywhere, as the pattern `\bFP0\d\d\b` would.
    pub fn find(message: &str) -> Option<Self> {
        let bytes = message.as_bytes();
        let word = |at: usize| bytes.get(at).is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
        message.match_indices("FP0").find_map(|(at, _)| {
            let whole = (at == 0 || !word(at - 1)) && !word(at + 5);
            let code = message.get(at..at + 5)?;
            Self::ALL.into_iter().find(|known| whole && known.as_str() == code)
        })
    }
}

/// What is done with older commands when a watermark rises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnTakeover {
    /// They go out first, in order: they were committed with the state that they announce.
    Deliver,
    /// They end as superseded.
    Discard,
    /// They are parked until the new holder or an operator says what to do.
    Review,
}

impl OnTakeover {
    /// The word that the database uses.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Deliver => "deliver",
            Self::Discard => "discard",
            Self::Review => "review",
        }
    }

    /// Reads [`OnTakeover::as_str`] back.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Deliver, Self::Discard, Self::Review].into_iter().find(|policy| policy.as_str() == text)
    }
}

/// What is known of a scope. A scope without a row is `None` where this is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScopeFacts<'a> {
    /// The greatest token accepted, 0 if none was yet.
    pub watermark: i64,
    /// Who issues the tokens; `None` as long as nobody said.
    pub source: Option<&'a str>,
    /// The holder bound to the watermark.
    pub holder: Option<&'a str>,
    /// Whether the scope was rebased: from then on the source must be named.
    pub rebased: bool,
    /// When the lease was granted or renewed, in milliseconds since 1970.
    pub granted_ms: Option<i64>,
    /// When the lease runs out; `None` without a lease, and after a release.
    pub until_ms: Option<i64>,
}

impl ScopeFacts<'_> {
    /// A scope that nobody has written to: watermark 0, no source, no holder.
    pub const NEW: ScopeFacts<'static> =
        ScopeFacts { watermark: 0, source: None, holder: None, rebased: false, granted_ms: None, until_ms: None };

    fn is_lease(&self) -> bool {
        self.source == Some(LEASE)
    }
}

/// The policy in force for a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScopePolicy {
    /// Whether a greater token must be sealed before it may write.
    pub require_seal: bool,
    /// How far a later token may jump.
    pub max_jump: i64,
}

/// What a worker says of itself in an insert, a fence or a seal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request<'a> {
    /// Its fencing token.
    pub token: FencingToken,
    /// Its identity, if it gave one.
    pub holder: Option<&'a str>,
    /// Who issued the token, if it said so.
    pub source: Option<&'a str>,
}

/// What the scope knows after an accepted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Admitted<'a> {
    /// The scope's facts from now on.
    pub facts: ScopeFacts<'a>,
    /// Whether the watermark rose, which is a take-over.
    pub raised: bool,
}

/// An insert or a fence into a known scope.
pub fn admit<'a>(scope: &ScopeFacts<'a>, request: &Request<'a>, policy: &ScopePolicy) -> Result<Admitted<'a>, Code> {
    check_source(scope, request)?;
    check_equal_or_lower(scope, request)?;
    if request.token.get() > scope.watermark {
        if scope.is_lease() || policy.require_seal {
            return Err(Code::NeverSealed);
        }
        check_jump(scope, request, policy)?;
    }
    Ok(raise(scope, request))
}

/// An insert or a fence into a scope that has no row yet.
pub fn admit_unknown<'a>(request: &Request<'a>, policy: &ScopePolicy) -> Result<Admitted<'a>, Code> {
    admit(&ScopeFacts::NEW, request, policy)
}

/// A seal: raises the watermark before the first read or write of a new holder. `require_seal` does
/// not ask for anything here, and a lease scope is sealed by its acquire alone.
pub fn seal<'a>(scope: &ScopeFacts<'a>, request: &Request<'a>, policy: &ScopePolicy) -> Result<Admitted<'a>, Code> {
    if scope.is_lease() {
        return Err(Code::Held);
    }
    check_source(scope, request)?;
    check_equal_or_lower(scope, request)?;
    check_jump(scope, request, policy)?;
    Ok(raise(scope, request))
}

/// What the holder of a lease says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseRequest<'a> {
    /// The identity of this one acquisition.
    pub holder: &'a str,
    /// How long the lease is to last, in milliseconds, 1 to [`TTL_MS_MAX`].
    pub ttl_ms: i64,
    /// The wall clock, in milliseconds since 1970.
    pub now_ms: i64,
}

/// An acquisition: issues watermark + 1 and seals with it.
pub fn acquire<'a>(scope: &ScopeFacts<'a>, request: &LeaseRequest<'a>) -> Result<Admitted<'a>, Code> {
    check_ttl(request.ttl_ms)?;
    if scope.source.is_some_and(|source| source != LEASE) || is_held(scope, request.now_ms) {
        return Err(Code::Held);
    }
    if scope.holder == Some(request.holder) {
        return Err(Code::IllegalValue);
    }
    if scope.watermark >= TOKEN_MAX {
        return Err(Code::JumpsTooFar);
    }
    let facts = ScopeFacts {
        watermark: scope.watermark + 1,
        source: Some(LEASE),
        holder: Some(request.holder),
        rebased: scope.rebased,
        granted_ms: Some(request.now_ms),
        until_ms: Some(request.now_ms.saturating_add(request.ttl_ms)),
    };
    Ok(Admitted { facts, raised: true })
}

/// A renewal: accepted as long as token and holder are the scope's, also after expiry or release.
pub fn renew<'a>(
    scope: &ScopeFacts<'a>,
    token: FencingToken,
    request: &LeaseRequest<'a>,
) -> Result<ScopeFacts<'a>, Code> {
    check_ttl(request.ttl_ms)?;
    check_lease_holder(scope, token, request.holder)?;
    let until_ms = Some(request.now_ms.saturating_add(request.ttl_ms));
    Ok(ScopeFacts { granted_ms: Some(request.now_ms), until_ms, ..*scope })
}

/// A release: the lease is free at once, token and holder stay until the next acquisition.
pub fn release<'a>(scope: &ScopeFacts<'a>, token: FencingToken, holder: &str) -> Result<ScopeFacts<'a>, Code> {
    check_lease_holder(scope, token, holder)?;
    Ok(ScopeFacts { until_ms: None, ..*scope })
}

fn check_source(scope: &ScopeFacts<'_>, request: &Request<'_>) -> Result<(), Code> {
    match (request.source, scope.source) {
        (Some(LEASE), ours) if ours != Some(LEASE) => Err(Code::Held),
        (Some(given), Some(ours)) if given != ours => Err(Code::OtherSource),
        (None, _) if scope.rebased => Err(Code::OtherSource),
        (_, _) => Ok(()),
    }
}

fn check_equal_or_lower(scope: &ScopeFacts<'_>, request: &Request<'_>) -> Result<(), Code> {
    if request.token.get() < scope.watermark {
        return Err(Code::StaleToken);
    }
    let other = matches!((scope.holder, request.holder), (Some(stored), Some(given)) if stored != given);
    if request.token.get() == scope.watermark && other { Err(Code::OtherHolder) } else { Ok(()) }
}

fn check_jump(scope: &ScopeFacts<'_>, request: &Request<'_>, policy: &ScopePolicy) -> Result<(), Code> {
    let first = scope.watermark == 0;
    if !first && request.token.get() - scope.watermark > policy.max_jump { Err(Code::JumpsTooFar) } else { Ok(()) }
}

fn check_ttl(ttl_ms: i64) -> Result<(), Code> {
    if (1..=TTL_MS_MAX).contains(&ttl_ms) { Ok(()) } else { Err(Code::IllegalValue) }
}

fn check_lease_holder(scope: &ScopeFacts<'_>, token: FencingToken, holder: &str) -> Result<(), Code> {
    if !scope.is_lease() {
        return Err(Code::Held);
    }
    if token.get() > scope.watermark {
        return Err(Code::NeverSealed);
    }
    check_equal_or_lower(scope, &Request { token, holder: Some(holder), source: None })
}

fn is_held(scope: &ScopeFacts<'_>, now_ms: i64) -> bool {
    let set_back = scope.granted_ms.is_some_and(|granted| now_ms < granted - CLOCK_SLACK_MS);
    scope.until_ms.is_some_and(|until| now_ms < until) && !set_back
}

fn raise<'a>(scope: &ScopeFacts<'a>, request: &Request<'a>) -> Admitted<'a> {
    let raised = request.token.get() > scope.watermark;
    let facts = ScopeFacts {
        watermark: request.token.get(),
        source: scope.source.or(request.source),
        holder: if raised { request.holder } else { scope.holder.or(request.holder) },
        ..*scope
    };
    Admitted { facts, raised }
}
