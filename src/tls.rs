//! TLS for every sender: one provider (ring), and roots from the system or from one file.
//!
//! There is no switch that turns verification off, here or anywhere: whoever needs a private
//! authority names its certificate. A `ca_file` replaces the system's roots and does not add to
//! them, so that a pinned relay can't be impersonated with a certificate of a public authority.

use std::path::{Path, PathBuf};
use std::sync::Once;

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use rustls_platform_verifier::BuilderVerifierExt;

/// Why TLS can't be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file can't be read, or isn't PEM.
    #[error("the CA file {} can't be read", path.display())]
    CaFile {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: rustls_pki_types::pem::Error,
    },
    /// The file holds no certificate.
    #[error("the CA file {} has no certificate", path.display())]
    NoCertificate {
        /// The file.
        path: PathBuf,
    },
    /// A certificate, or the system's verifier, is refused by the TLS library.
    #[error("the roots can't be used")]
    Roots(#[from] rustls::Error),
}

/// Makes ring the process's provider, once. Clients panic when they are built without one.
pub(crate) fn install_provider() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // An error means that the application has installed a provider already: it stays.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

/// A client that trusts the certificates of this file only, or those of the system.
pub(crate) fn client_config(ca_file: Option<&Path>) -> Result<ClientConfig, TlsError> {
    install_provider();
    let builder = ClientConfig::builder();
    Ok(match ca_file {
        Some(path) => builder.with_root_certificates(roots(path)?).with_no_client_auth(),
        None => builder.with_platform_verifier()?.with_no_client_auth(),
    })
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let unreadable = |source| TlsError::CaFile { path: path.to_owned(), source };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(unreadable)? {
        roots.add(certificate.map_err(unreadable)?)?;
    }
    if roots.is_empty() { Err(TlsError::NoCertificate { path: path.to_owned() }) } else { Ok(roots) }
}
