//! `fencepost demo`: a stale worker is refused, before the user's eyes.

use crate::Globals;

/// Options of `fencepost demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Plays the scene.
pub(crate) async fn run(_args: Args, _globals: &Globals) -> anyhow::Result<()> {
    anyhow::bail!("demo is not built yet")
}
