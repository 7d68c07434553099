//! Busy writers and a busy dispatcher on one file (H16). Short here; `FENCEPOST_LONG=1` runs it as long as
//! the case says.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rusqlite::TransactionBehavior;

use crate::support::daemon::{Site, webhook};
use crate::support::http::{Reply, Server};
use crate::support::wait_until;

/// H16: four writers at 200 rows a second each. No "database is locked" in the dispatcher's log, no
/// outcome lost, and no verb takes longer than the busy timeout and a second.
#[test]
fn h16_busy_writers_and_a_busy_dispatcher() {
    let long = std::env::var_os("FENCEPOST_LONG").is_some();
    let seconds = if long { 600 } else { 10 };
    let server = Server::start(|_| Reply::status(200));
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), "max_in_flight = 64"));
    let daemon = site.start();
    let stop = AtomicBool::new(false);
    let rows = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let (site, stop, rows) = (&site, &stop, &rows);
            scope.spawn(move || {
                let mut connection = site.connect();
                let mut next = Instant::now();
                let mut count = 0;
                while !stop.load(Ordering::SeqCst) {
                    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
                    transaction
                        .execute(
                            "INSERT INTO outbox(scope, token, kind, destination, payload) VALUES (?1, 1, 'webhook', 'billing', '{}')",
                            [format!("s{writer}/{}", count % 20)],
                        )
                        .unwrap();
                    transaction.commit().unwrap();
                    count += 1;
                    rows.fetch_add(1, Ordering::SeqCst);
                    next += Duration::from_millis(5);
                    std::thread::sleep(next.saturating_duration_since(Instant::now()));
                }
            });
        }
        std::thread::sleep(Duration::from_secs(seconds));
        stop.store(true, Ordering::SeqCst);
    });
    let rows = i64::try_from(rows.into_inner()).unwrap();
    let delivered = || site.value::<i64>("SELECT count(*) FROM outbox_state WHERE state = 'delivered'");
    wait_until("all rows are delivered", 60 + seconds, || delivered() == rows);
    let log = daemon.log();
    daemon.stop();
    assert!(!log.contains("locked") && !log.contains("can't be recorded") && !log.contains("ERROR"), "{log}");
    assert_eq!(server.requests().len(), usize::try_from(rows).unwrap(), "each arrived once");
    let slowest: i64 = site.value("SELECT max(settled_ms - begun_ms) FROM outbox_attempt");
    assert!(slowest < 6_000, "the slowest attempt, all verbs and the send included, took {slowest} ms");
    println!("{rows} rows, slowest attempt {slowest} ms");
}
