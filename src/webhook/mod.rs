//! The webhook sender: one POST in, one honest outcome out.

use std::time::Duration;

use ipnet::IpNet;
use secrecy::SecretString;

/// How one endpoint is called.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where the POST goes. `None`: the command's destination is the URL (`[webhook_urls]`).
    pub url: Option<url::Url>,
    /// Standard Webhooks secrets (`whsec_…`); every one signs. Empty: unsigned.
    pub secrets: Vec<SecretString>,
    /// Resolve, connect and TLS.
    pub connect_timeout: Duration,
    /// The longest silence while the answer is awaited.
    pub read_timeout: Duration,
    /// The whole attempt.
    pub timeout: Duration,
    /// Networks that the address guard would close otherwise.
    pub allow_networks: Vec<IpNet>,
    /// Status codes of the unknown row with which this endpoint says that nothing happened.
    pub effect_free_status: Vec<u16>,
    /// A PEM file with the only roots to trust; `None`: the system's.
    pub ca_file: Option<std::path::PathBuf>,
}
