//! `fencepost run`: the daemon.

use crate::Globals;

/// Options of `fencepost run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// End when nothing is in flight and nothing is due
    #[arg(long)]
    pub(crate) drain: bool,
    /// Wait for one's turn instead of ending with 75 if a dispatcher runs already
    #[arg(long)]
    pub(crate) wait: bool,
}

/// Runs the dispatcher until it is stopped.
pub(crate) async fn run(_args: Args, _globals: &Globals) -> anyhow::Result<()> {
    anyhow::bail!("run is not built yet")
}
