//! The one TLS provider of the process.
//!
//! Building a TLS client without a provider panics, so every sender asks for it here before it
//! builds one. It never replaces a provider that the application installed, and nobody who uses the
//! library has to remember it in `main`.

use std::sync::Once;

/// Makes ring the provider of this process, unless one is installed already.
pub(crate) fn install_provider() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        // An error means that the application chose a provider first: that one stays.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}
