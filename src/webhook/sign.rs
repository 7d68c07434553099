//! Standard Webhooks signatures (version 1, HMAC-SHA256).
//!
//! The signature covers the command id, the time of the attempt and the body exactly as it is
//! stored. A secret that isn't understood completely is refused when the sender is built: a key
//! that was cut or taken literally would sign, and nobody could verify it. A secret is never shown.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretSlice, SecretString};
use sha2::Sha256;

const PREFIX: &str = "whsec_";
const KEY_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// Every key signs, so that a receiver can change from one to the next without a gap.
#[derive(Debug)]
pub(super) struct Keys(Vec<SecretSlice<u8>>);

impl Keys {
    /// Reads the secrets; the error is the place of the first bad one, from 0.
    pub(super) fn parse(secrets: &[SecretString]) -> Result<Self, usize> {
        let keys = secrets.iter().enumerate().map(|(index, secret)| parse(secret.expose_secret()).ok_or(index));
        keys.collect::<Result<_, _>>().map(Self)
    }

    /// The value of `webhook-signature`, or `None` without a key.
    pub(super) fn sign(&self, id: &str, timestamp_s: i64, body: &[u8]) -> Option<String> {
        let signatures = self.0.iter().map(|key| {
            let mut mac = Hmac::<Sha256>::new_from_slice(key.expose_secret()).expect("HMAC takes a key of any length");
            mac.update(format!("{id}.{timestamp_s}.").as_bytes());
            mac.update(body);
            format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
        });
        Some(signatures.collect::<Vec<_>>().join(" ")).filter(|value| !value.is_empty())
    }
}

fn parse(secret: &str) -> Option<SecretSlice<u8>> {
    let key = STANDARD.decode(secret.strip_prefix(PREFIX)?).ok()?;
    KEY_BYTES.contains(&key.len()).then(|| key.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(secrets: &[&str]) -> Result<Keys, usize> {
        Keys::parse(&secrets.iter().map(|&secret| SecretString::from(secret)).collect::<Vec<_>>())
    }

    #[test]
    fn h29_valid_secrets_give_the_published_signatures() {
        for (secret, signature) in [
            ("whsec_AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcY", "v1,ZRwptCttNC5O97pHrRWxnyi+1LqoT7AN5IRihFUZpk0="),
            ("whsec_++//++//++//++//++//++//++//++//", "v1,07RqtEjv8mZXqu2PQVyHP1w1+YqnItUjO7/t748cHPY="),
        ] {
            let signed = keys(&[secret]).expect("a legal secret").sign("msg_2f0a", 1_796_205_600, b"{\"a\":1}\n");
            assert_eq!(signed.as_deref(), Some(signature));
        }
    }

    #[test]
    fn h29_a_secret_that_is_not_understood_is_refused() {
        let long = format!("whsec_{}", STANDARD.encode([7; 65]));
        for secret in [
            "whsec_",
            "",
            "whsec_@@@@",
            "v1,whsec_AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcY",
            "whsec_AQIDBAUGBwgJCgsMDQ4PEBESExQVFh*=",
            "whsec_c2hvcnQ=",
            " whsec_AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcY\n",
            "AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcY",
            "whsec_--__--__--__--__--__--__--__--__",
            "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGA",
            &long,
        ] {
            assert_eq!(keys(&["whsec_AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcY", secret]).err(), Some(1), "{secret:?}");
        }
    }

    #[test]
    fn without_a_key_nothing_is_signed() {
        assert_eq!(keys(&[]).expect("no secret").sign("a", 1, b""), None);
    }
}
