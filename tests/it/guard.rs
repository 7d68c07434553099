//! The address guard: the table against an independent reading of it, by property.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fencepost::webhook::{AddressNotAllowed, Guard};
use proptest::prelude::*;
use reqwest::dns::Resolve;

fn closed(address: impl Into<IpAddr>) -> bool {
    Guard::default().check_address(address.into()).is_err()
}

fn opened_by(network: &str, address: &str) -> bool {
    Guard::new(vec![network.parse().unwrap()]).check_address(address.parse().unwrap()).is_ok()
}

/// IANA's special-purpose networks, multicast and the reserved rest, read by hand as first and last
/// address: another form than the one in the guard, so that the same slip can't be in both.
const INSIDE_V4: [(&str, &str); 15] = [
    ("0.0.0.0", "0.255.255.255"),
    ("10.0.0.0", "10.255.255.255"),
    ("100.64.0.0", "100.127.255.255"),
    ("127.0.0.0", "127.255.255.255"),
    ("169.254.0.0", "169.254.255.255"),
    ("172.16.0.0", "172.31.255.255"),
    ("192.0.0.0", "192.0.0.255"),
    ("192.0.2.0", "192.0.2.255"),
    ("192.88.99.0", "192.88.99.255"),
    ("192.168.0.0", "192.168.255.255"),
    ("198.18.0.0", "198.19.255.255"),
    ("198.51.100.0", "198.51.100.255"),
    ("203.0.113.0", "203.0.113.255"),
    ("224.0.0.0", "239.255.255.255"),
    ("240.0.0.0", "255.255.255.255"),
];

const INSIDE_V6: [(&str, &str); 16] = [
    ("::", "::"),
    ("::1", "::1"),
    ("::2", "::ffff:ffff"),
    ("::ffff:0:0:0", "::ffff:0:ffff:ffff"),
    ("64:ff9b:1::", "64:ff9b:1:ffff:ffff:ffff:ffff:ffff"),
    ("100::", "100::ffff:ffff:ffff:ffff"),
    ("100:0:0:1::", "100:0:0:1:ffff:ffff:ffff:ffff"),
    ("2001::", "2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff"),
    ("2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff"),
    ("3fff::", "3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff"),
    ("4000::", "5eff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
    ("5f00::", "5f00:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
    ("fc00::", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
    ("fe80::", "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
    ("fec0::", "feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
    ("ff00::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
];

fn inside_v4(address: Ipv4Addr) -> bool {
    let parse = |text: &str| text.parse::<Ipv4Addr>().unwrap();
    INSIDE_V4.iter().any(|(first, last)| (parse(first)..=parse(last)).contains(&address))
}

/// Addresses at the edges of the networks are where a wrong length shows.
fn any_v4() -> impl Strategy<Value = Ipv4Addr> {
    let edge = (0..INSIDE_V4.len(), any::<bool>(), -2_i64..=2).prop_map(|(n, last, step)| {
        let text = if last { INSIDE_V4[n].1 } else { INSIDE_V4[n].0 };
        let edge = i64::from(u32::from(text.parse::<Ipv4Addr>().unwrap()));
        Ipv4Addr::from((edge + step).clamp(0, i64::from(u32::MAX)) as u32)
    });
    prop_oneof![any::<u32>().prop_map(Ipv4Addr::from), edge]
}

proptest! {
    #[test]
    fn an_ipv4_address_is_closed_exactly_if_it_is_inside(address in any_v4()) {
        prop_assert_eq!(closed(address), inside_v4(address));
    }

    /// IPv4-mapped, NAT64 and 6to4 forms are worth what they carry, whatever else they hold.
    #[test]
    fn an_ipv6_address_that_carries_an_ipv4_address_is_judged_by_it(address in any_v4(), rest in any::<[u16; 5]>()) {
        let [a, b, c, d] = address.octets().map(u16::from);
        let (high, low) = (a << 8 | b, c << 8 | d);
        let [e, f, g, h, i] = rest;
        for carrier in [
            Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, high, low),
            Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
            Ipv6Addr::new(0x2002, high, low, e, f, g, h, i),
        ] {
            prop_assert_eq!(closed(carrier), inside_v4(address), "{}", carrier);
        }
    }

    #[test]
    fn an_ipv6_address_inside_is_closed(n in 0..INSIDE_V6.len(), offset in any::<u128>()) {
        let (first, last) = INSIDE_V6[n];
        let [first, last] = [first, last].map(|text| u128::from(text.parse::<Ipv6Addr>().unwrap()));
        let size = last - first + 1;
        prop_assert!(closed(Ipv6Addr::from(first + offset % size)));
    }

    /// Outside of 2000::/3 nothing is open but what carries an open IPv4 address.
    #[test]
    fn only_global_unicast_is_open(address in any::<u128>().prop_map(Ipv6Addr::from)) {
        if address.segments()[0] >> 13 != 1 && address.to_ipv4_mapped().is_none() {
            prop_assert!(closed(address) || address.segments()[..2] == [0x64, 0xff9b]);
        }
    }

    /// Opening a network opens all of it and nothing else.
    #[test]
    fn an_opened_network_is_open(address in any_v4(), length in 8_u8..=32, other in any_v4()) {
        let network = ipnet::Ipv4Net::new(address, length).unwrap().trunc();
        let guard = Guard::new(vec![network.into()]);
        prop_assert!(guard.check_address(address.into()).is_ok());
        prop_assert!(guard.check_address(address.to_ipv6_mapped().into()).is_ok());
        let open = network.contains(&other) || !inside_v4(other);
        prop_assert_eq!(guard.check_address(other.into()).is_ok(), open);
    }
}

#[test]
fn public_addresses_are_open() {
    for address in ["172.32.0.1", "169.253.0.1", "11.0.0.1", "100.128.0.1", "198.20.0.1", "2606:4700::1", "2a00::1"] {
        assert!(!closed(address.parse::<IpAddr>().unwrap()), "{address}");
    }
}

#[test]
fn an_ipv6_network_can_be_opened() {
    assert!(opened_by("::1/128", "::1"));
    assert!(opened_by("fd00:1::/32", "fd00:1::7"));
    assert!(!opened_by("fd00:1::/32", "fd00:2::7"));
    assert!(!opened_by("::1/128", "127.0.0.1"));
}

/// Of a name with several addresses only those are dialled that may be; a name with none of them is
/// refused, and one without any address is for the connection to fail.
#[test]
fn h35_of_several_addresses_only_the_open_ones_are_left() {
    let guard = Guard::default();
    let addresses = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<SocketAddr>>();
    let both = addresses(&["10.0.0.1:0", "11.0.0.1:0", "[::1]:0"]);
    assert_eq!(guard.admit(both), Ok(addresses(&["11.0.0.1:0"])));
    let none = guard.admit(addresses(&["127.0.0.1:0", "[::1]:0"])).unwrap_err();
    assert_eq!(none.to_string(), "address not allowed: 127.0.0.1");
    assert_eq!(guard.admit(Vec::new()), Ok(Vec::new()));
}

#[test]
fn h35_a_name_is_judged_by_what_it_resolves_to() {
    let resolve = |guard: Guard| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(guard.resolve("localhost".parse().unwrap())).map(Iterator::collect::<Vec<_>>)
    };
    let denied = resolve(Guard::default()).unwrap_err();
    assert!(denied.downcast_ref::<AddressNotAllowed>().is_some_and(|denied| denied.address.is_loopback()));
    let loopback = ["127.0.0.0/8", "::1/128"].map(|network| network.parse().unwrap()).to_vec();
    assert!(!resolve(Guard::new(loopback)).unwrap().is_empty());
}
