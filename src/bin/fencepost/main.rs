//! The command-line tool.
#![expect(clippy::print_stdout, reason = "a command-line tool prints")]
mod run;
use clap::Parser;
#[derive(Parser)]
struct Cli { #[arg(long, global=true)] db: Option<std::path::PathBuf>, #[arg(long, global=true)] config: Option<std::path::PathBuf>, #[command(subcommand)] c: C }
#[derive(clap::Subcommand)]
enum C { Run(run::Args), Init }
fn main() {
    tracing_subscriber::fmt().with_env_filter("fencepost=debug").with_writer(std::io::stderr).init();
    let cli = Cli::parse();
    let db = cli.db.unwrap_or_else(|| "app.db".into());
    match cli.c {
        C::Init => { let mut c = rusqlite::Connection::open(db).unwrap(); fencepost::sqlite::prepare(&c).unwrap(); let t = c.transaction().unwrap(); fencepost::sqlite::migrate(&t).unwrap(); t.commit().unwrap(); println!("ok"); }
        C::Run(a) => { let cfg = fencepost::config::Config::load(cli.config.as_deref(), &|k| std::env::var(k).ok()).unwrap_or_else(|e| { eprintln!("{e:?}"); std::process::exit(78) });
          match run::run(&a, &cfg, &db) { Ok(s) => println!("{s:?}"), Err(e) => { eprintln!("fencepost: {e}"); std::process::exit(e.exit_code().into()) } } }
    }
}
