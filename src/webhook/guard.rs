//! The address guard: which network addresses a webhook may be sent to.
//!
//! Whoever may write a command could otherwise make the dispatcher call services inside its own
//! network. The guard judges the address that is really dialled: literals in the URL, because a
//! resolver is never asked for them, and every address that a name resolves to, at each connection
//! anew, so that a name can't change its answer in between. It never looks at spellings: the URL
//! parser has turned all of them into numbers. What it doesn't know to be public is closed;
//! `allow_networks` opens it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use url::{Host, Url};

/// The guard of one endpoint.
#[derive(Clone, Debug, Default)]
pub struct Guard {
    allow: Vec<IpNet>,
}

/// The guard closes this address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("address not allowed: {address}")]
pub struct AddressNotAllowed {
    /// The address that would have been dialled.
    pub address: IpAddr,
}

impl Guard {
    /// A guard that closes everything that isn't public, except `allow`.
    pub fn new(allow: Vec<IpNet>) -> Self {
        Self { allow }
    }

    /// Fails if the address may not be dialled.
    pub fn check_address(&self, address: IpAddr) -> Result<(), AddressNotAllowed> {
        let reached = reached(address);
        let opened = self.allow.iter().any(|network| network.contains(&address) || network.contains(&reached));
        if opened || is_public(reached) { Ok(()) } else { Err(AddressNotAllowed { address }) }
    }

    /// Fails if the host of the URL is an address that may not be dialled. A name passes: it is
    /// judged by what it resolves to. Only `localhost` and the names below it mean the loopback
    /// whatever a resolver says (RFC 6761 §6.3).
    pub fn check_host(&self, url: &Url) -> Result<(), AddressNotAllowed> {
        match url.host() {
            Some(Host::Ipv4(address)) => self.check_address(address.into()),
            Some(Host::Ipv6(address)) => self.check_address(address.into()),
            Some(Host::Domain(name)) if is_localhost(name) => self
                .check_address(Ipv4Addr::LOCALHOST.into())
                .or_else(|denied| self.check_address(Ipv6Addr::LOCALHOST.into()).map_err(|_| denied)),
            Some(Host::Domain(_)) | None => Ok(()),
        }
    }

    /// Keeps the addresses that may be dialled. Fails if there were some and none is left.
    pub fn admit(&self, addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, AddressNotAllowed> {
        let mut denied = None;
        let mut admitted = Vec::with_capacity(addresses.len());
        for address in addresses {
            match self.check_address(address.ip()) {
                Ok(()) => admitted.push(address),
                Err(error) => denied = denied.or(Some(error)),
            }
        }
        match denied {
            Some(error) if admitted.is_empty() => Err(error),
            _ => Ok(admitted),
        }
    }
}

/// reqwest dials the addresses returned here and no others, so nothing can change between the check
/// and the connection.
impl Resolve for Guard {
    fn resolve(&self, name: Name) -> Resolving {
        let guard = self.clone();
        Box::pin(async move {
            // Port 0 stands for the port of the URL.
            let addresses = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            let admitted: Addrs = Box::new(guard.admit(addresses)?.into_iter());
            Ok(admitted)
        })
    }
}

fn is_localhost(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    name == "localhost" || name.ends_with(".localhost")
}

/// The address that answers in the end: IPv6 forms that carry an IPv4 address are unwrapped, where
/// the network would do the same (IPv4-mapped, NAT64 of RFC 6052, 6to4 of RFC 3056).
fn reached(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else { return address };
    let [a, b, c, d, e, f, g, h] = v6.segments();
    let carried = match (a, b) {
        (0, 0) if (c, d, e, f) == (0, 0, 0, 0xffff) => Some((g, h)),
        (0x64, 0xff9b) if (c, d, e, f) == (0, 0, 0, 0) => Some((g, h)),
        (0x2002, _) => Some((b, c)),
        _ => None,
    };
    carried.map_or(address, |(high, low)| {
        let ([w, x], [y, z]) = (high.to_be_bytes(), low.to_be_bytes());
        IpAddr::V4(Ipv4Addr::new(w, x, y, z))
    })
}

fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !NOT_PUBLIC_V4.iter().any(|network| network.contains(&v4)),
        IpAddr::V6(v6) => GLOBAL_V6.contains(&v6) && !NOT_PUBLIC_V6.iter().any(|network| network.contains(&v6)),
    }
}

const fn v4(a: u8, b: u8, c: u8, d: u8, length: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), length)
}

const fn v6(a: u16, b: u16, length: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, 0, 0, 0, 0, 0, 0), length)
}

/// IANA's special-purpose registry for IPv4, with multicast and the reserved rest.
const NOT_PUBLIC_V4: [Ipv4Net; 15] = [
    v4(0, 0, 0, 0, 8),
    v4(10, 0, 0, 0, 8),
    v4(100, 64, 0, 0, 10),
    v4(127, 0, 0, 0, 8),
    v4(169, 254, 0, 0, 16),
    v4(172, 16, 0, 0, 12),
    v4(192, 0, 0, 0, 24),
    v4(192, 0, 2, 0, 24),
    v4(192, 88, 99, 0, 24),
    v4(192, 168, 0, 0, 16),
    v4(198, 18, 0, 0, 15),
    v4(198, 51, 100, 0, 24),
    v4(203, 0, 113, 0, 24),
    v4(224, 0, 0, 0, 4),
    v4(240, 0, 0, 0, 4),
];

/// The only part of IPv6 that is given out for the public internet (RFC 4291 §2.4). Everything
/// outside is closed with it: unspecified, loopback, IPv4-compatible, local NAT64, discard, segment
/// routing, unique local, link-local, site-local, multicast.
const GLOBAL_V6: Ipv6Net = v6(0x2000, 0, 3);

/// Special-purpose networks inside [`GLOBAL_V6`]: protocol assignments (with Teredo) and
/// documentation. 6to4 is unwrapped before.
const NOT_PUBLIC_V6: [Ipv6Net; 3] = [v6(0x2001, 0, 23), v6(0x2001, 0xdb8, 32), v6(0x3fff, 0, 20)];
