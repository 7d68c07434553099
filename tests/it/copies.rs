//! Copies of a database don't send: cp, backup, an old file put back, a clone (H58).

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};

use rusqlite::Connection;

use crate::support::daemon::{BINARY, Daemon, Site, webhook};
use crate::support::http::{Gate, Reply, Server};
use crate::support::wait_until;

/// Any command of the binary on another file, with the site's configuration.
fn on(site: &Site, path: &Path, arguments: &[&str]) -> Output {
    Command::new(BINARY).arg("--db").arg(path).arg("--config").arg(site.config()).args(arguments).output().unwrap()
}

fn log(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn assert_refused(output: &Output, code: i32, says: &str) {
    assert_eq!(output.status.code(), Some(code), "{}", log(output));
    assert!(log(output).contains(says), "{says:?}: {}", log(output));
    assert!(!log(output).contains("dispatching"), "{}", log(output));
}

fn get<T: rusqlite::types::FromSql>(path: &Path, sql: &str) -> T {
    Connection::open(path).unwrap().query_row(sql, [], |row| row.get(0)).unwrap()
}

fn commands(site: &Site, from: usize, to: usize) {
    let each = |n| {
        format!(
            "INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('w{n}', 's{}', 1, 'webhook', 'billing', '{{}}');",
            n % 10
        )
    };
    site.sql(&(from..to).map(each).collect::<String>());
}

/// A site whose dispatcher has sent some commands and was killed with others waiting behind a gate.
fn in_use() -> (Server, Gate, Site) {
    let gate = Gate::new();
    let held = gate.clone();
    let server = Server::start(move |request| {
        let reply = Reply::status(200);
        if request.body == b"hold" { reply.held_by(&held) } else { reply }
    });
    let site = Site::new();
    site.configure(&webhook("billing", &server.url(), ""));
    (server, gate, site)
}

/// H58 (a): the main file alone, without what was committed since the last checkpoint.
#[test]
fn h58_a_copy_of_the_main_file_alone_sends_nothing() {
    let (server, _gate, site) = in_use();
    commands(&site, 0, 100);
    let daemon = site.start();
    server.wait_for(100);
    wait_until("all are delivered", 30, || {
        site.value::<i64>("SELECT count(*) FROM outbox_state WHERE state = 'delivered'") == 100
    });
    let copy = site.dir.path().join("copy.db");
    std::fs::copy(site.db(), &copy).unwrap();
    let before = std::fs::read(&copy).unwrap();
    for state in ["while the original runs", "after it was killed"] {
        let refused = on(&site, &copy, &["run", "--drain"]);
        assert_refused(&refused, 78, "is a copy: its 100 live commands");
        assert!(
            log(&refused).contains("run --moved") && log(&refused).contains("adopt-clone"),
            "{state}: {}",
            log(&refused)
        );
    }
    daemon.kill();
    assert_refused(&on(&site, &copy, &["run", "--drain"]), 78, "is a copy");
    assert_eq!(server.requests().len(), 100, "each was sent once");
    assert!(std::fs::read(&copy).unwrap() == before, "a refusal writes nothing");
    // The original goes on; the same file under another name and path is still the same file.
    site.drain();
    let elsewhere = site.dir.path().join("moved.db");
    for ending in ["", "-wal", "-shm", ".dispatcher.lock"] {
        let name = |path: &Path| PathBuf::from(format!("{}{ending}", path.display()));
        if name(&site.db()).exists() {
            std::fs::rename(name(&site.db()), name(&elsewhere)).unwrap();
        }
    }
    assert!(on(&site, &elsewhere, &["run", "--drain"]).status.success());
}

/// A copy made while commands wait, and told that the original is gone: it takes its place.
#[test]
fn a_moved_database_sends_once_somebody_says_so() {
    let (server, _gate, site) = in_use();
    commands(&site, 0, 1);
    site.drain();
    commands(&site, 1, 3);
    let copy = site.dir.path().join("new.db");
    assert!(site.command("backup").arg(&copy).output().unwrap().status.success());
    assert_refused(&on(&site, &copy, &["run", "--drain"]), 78, "is a backup: its 2 live commands");
    std::fs::remove_file(site.db()).unwrap();
    let moved = on(&site, &copy, &["run", "--drain", "--moved"]);
    assert!(moved.status.success(), "{}", log(&moved));
    assert_eq!(server.requests().len(), 3);
    assert_eq!(get::<String>(&copy, "SELECT verb || ': ' || reason FROM outbox_audit"), "moved: the original is gone");
    // From now on it is the original.
    Connection::open(&copy)
        .unwrap()
        .execute_batch(
            "INSERT INTO outbox(scope, token, kind, destination, payload) VALUES ('s', 1, 'webhook', 'billing', '{}')",
        )
        .unwrap();
    assert!(on(&site, &copy, &["run", "--drain"]).status.success());
    assert_eq!(server.requests().len(), 4);
    assert_eq!(get::<i64>(&copy, "SELECT count(*) FROM outbox_audit"), 1, "it moved once");
}

/// Where nothing waits, a copy can't send twice: it is simply taken.
#[test]
fn a_copy_without_live_commands_is_taken() {
    let (server, _gate, site) = in_use();
    commands(&site, 0, 2);
    site.drain();
    let copy = site.dir.path().join("copy.db");
    assert!(site.command("backup").arg(&copy).output().unwrap().status.success());
    assert!(on(&site, &copy, &["run", "--drain"]).status.success());
    assert_eq!(get::<Option<i64>>(&copy, "SELECT copied_ms FROM outbox_dispatcher"), None);
    assert_eq!(server.requests().len(), 2);
}

/// H58 (b): a backup under load is one moment of the original, whole, and sends nothing by itself.
#[test]
fn h58_a_backup_under_load_is_consistent_and_silent() {
    let (server, _gate, site) = in_use();
    commands(&site, 0, 200);
    let daemon = site.start();
    let copy = site.dir.path().join("backup.db");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut n = 200;
            while !stop.load(Ordering::SeqCst) {
                commands(&site, n, n + 10);
                n += 10;
            }
        });
        server.wait_for(50);
        let made = site.command("backup").arg(&copy).arg("--json").output().unwrap();
        stop.store(true, Ordering::SeqCst);
        assert!(made.status.success(), "{}", log(&made));
        assert!(String::from_utf8_lossy(&made.stdout).contains("\"commands\""));
    });
    daemon.kill();
    assert_eq!(copy.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let left: Vec<_> = std::fs::read_dir(site.dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(!left.iter().any(|name| name.contains("partial") || name.starts_with("backup.db-")), "{left:?}");
    let db = Connection::open(&copy).unwrap();
    fencepost::sqlite::verify(&db).unwrap();
    assert_eq!(db.query_row("PRAGMA journal_mode", [], |row| row.get::<_, String>(0)).unwrap(), "wal");
    // One moment: every command has its state, seqs have no gap, and open attempts belong to what is sent.
    for (sql, right) in [
        ("SELECT count(*) FROM outbox o LEFT JOIN outbox_state x ON x.n = o.n WHERE x.n IS NULL", 0),
        (
            "SELECT count(*) FROM outbox_scope s WHERE s.next_seq - 1 <> (SELECT count(*) FROM outbox_state x WHERE x.scope = s.scope)",
            0,
        ),
        (
            "SELECT count(*) FROM outbox_attempt a JOIN outbox_state x ON x.n = a.n WHERE a.settled_ms IS NULL AND x.state <> 'sending'",
            0,
        ),
        ("SELECT attempts - (SELECT total(attempt_no) FROM outbox_state) FROM outbox_dispatcher", 0),
    ] {
        assert_eq!(db.query_row(sql, [], |row| row.get::<_, f64>(0)).unwrap(), f64::from(right), "{sql}");
    }
    drop(db);
    let sent = server.requests().len();
    let live: i64 = get(&copy, "SELECT count(*) FROM outbox_state WHERE state NOT IN ('delivered', 'dead')");
    if live > 0 {
        assert_refused(&on(&site, &copy, &["run", "--drain"]), 78, "is a backup");
    }
    assert_eq!(server.requests().len(), sent);
    // Nothing is overwritten, nor put beside what SQLite would take for a part of it.
    assert_refused(&site.command("backup").arg(&copy).output().unwrap(), 64, "exists already");
    std::fs::write(site.dir.path().join("b.db-wal"), "").unwrap();
    assert_refused(
        &site.command("backup").arg(site.dir.path().join("b.db")).output().unwrap(),
        64,
        "b.db-wal exists already",
    );
}

/// A database that isn't in order has no backup: a file that can't be used would look like one.
#[test]
fn an_unsound_database_has_no_backup() {
    let site = Site::new();
    site.sql("DROP TRIGGER outbox_admit");
    let copy = site.dir.path().join("backup.db");
    assert_refused(&site.command("backup").arg(&copy).output().unwrap(), 74, "not sound");
    assert!(!copy.exists());
    assert_eq!(
        std::fs::read_dir(site.dir.path())
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().contains("partial"))
            .count(),
        0
    );
}

/// Puts bytes into the live file itself, as `cp old live` does: the inode stays.
fn put_back(site: &Site, old: &[u8]) {
    std::fs::write(site.db(), old).unwrap();
}

fn checkpointed(site: &Site) -> Vec<u8> {
    let busy: i64 = get(&site.db(), "PRAGMA wal_checkpoint(TRUNCATE)");
    assert_eq!(busy, 0);
    std::fs::read(site.db()).unwrap()
}

/// H58 (c): an old file over the live one, with and without the -wal that was there, and after a stop
/// as after a kill.
#[test]
fn h58_an_old_file_put_back_is_noticed() {
    for (killed, keeps_wal) in [(false, false), (false, true), (true, false), (true, true)] {
        let (server, _gate, site) = in_use();
        commands(&site, 0, 10);
        site.drain();
        commands(&site, 10, 300);
        let old = checkpointed(&site);
        // The first half is checkpointed and its WAL begun anew; the second half stays in the -wal.
        let sent = |n: usize| {
            let daemon = site.start();
            server.wait_for(n);
            site.wait_for_state(&format!("w{}", n - 1), "delivered");
            if killed { daemon.kill() } else { daemon.stop() }
        };
        sent(300);
        checkpointed(&site);
        commands(&site, 300, 320);
        sent(320);
        put_back(&site, &old);
        if !keeps_wal {
            for ending in ["-wal", "-shm"] {
                drop(std::fs::remove_file(format!("{}{ending}", site.db().display())));
            }
        }
        let refused = on(&site, &site.db(), &["run", "--drain"]);
        let case = format!("killed {killed}, keeps the -wal {keeps_wal}: {}", log(&refused));
        assert_eq!(refused.status.code(), Some(if keeps_wal { 74 } else { 78 }), "{case}");
        let says = if keeps_wal { "damaged, or mixed" } else { "is an old copy" };
        assert!(log(&refused).contains(says) && log(&refused).contains("hint"), "{case}");
        assert_eq!(server.requests().len(), 320, "nothing was sent again: {case}");
        if !keeps_wal {
            // A person's word about the file is not one about its age.
            assert_refused(&on(&site, &site.db(), &["run", "--drain", "--moved"]), 78, "is an old copy");
        }
    }
}

/// An old file whose whole history since stands in the -wal is the newest state: nothing is lost.
#[test]
fn an_old_file_with_all_of_its_wal_is_the_newest_state() {
    let (server, _gate, site) = in_use();
    commands(&site, 0, 5);
    site.drain();
    commands(&site, 5, 8);
    let old = checkpointed(&site);
    let daemon = site.start();
    server.wait_for(8);
    for id in ["w5", "w6", "w7"] {
        site.wait_for_state(id, "delivered");
    }
    daemon.kill();
    put_back(&site, &old);
    site.drain();
    assert_eq!(server.requests().len(), 8);
}

/// A clone becomes a database of its own: everything live is parked, with a reason in the audit.
#[test]
fn a_clone_is_adopted_with_everything_parked() {
    let (server, gate, site) = in_use();
    site.configure(&format!(
        "{}{}",
        webhook("billing", &server.url(), ""),
        webhook("holding", &server.url(), "on_unknown = \"hold\"")
    ));
    commands(&site, 0, 1);
    site.drain();
    for (id, destination) in [("resend", "billing"), ("hold", "holding")] {
        site.sql(&format!("INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES ('{id}', '{id}', 1, 'webhook', '{destination}', 'hold')"));
    }
    let daemon = site.start();
    server.wait_for(3);
    site.webhook("waiting", "resend", 1, "billing");
    let copy = site.dir.path().join("staging.db");
    assert!(site.command("backup").arg(&copy).output().unwrap().status.success());
    assert_eq!(
        on(&site, &site.db(), &["adopt-clone", "--reason", "staging"]).status.code(),
        Some(75),
        "the original is in use"
    );
    gate.open();
    daemon.stop();
    let uuid: String = get(&copy, "SELECT uuid FROM outbox_meta");
    assert_eq!(on(&site, &copy, &["adopt-clone", "--reason", " "]).status.code(), Some(64));
    let adopted = on(&site, &copy, &["adopt-clone", "--reason", "staging", "--who", "ann"]);
    assert!(adopted.status.success(), "{}", log(&adopted));
    assert!(String::from_utf8_lossy(&adopted.stdout).contains("2 commands are parked and 1 in doubt"), "{adopted:?}");
    assert_ne!(get::<String>(&copy, "SELECT uuid FROM outbox_meta"), uuid);
    assert_eq!(get::<String>(&copy, "SELECT who || verb || reason FROM outbox_audit"), "annadopt-clonestaging");
    let states: String =
        get(&copy, "SELECT group_concat(id || ' ' || state) FROM (SELECT * FROM outbox_status ORDER BY id)");
    assert_eq!(states, "hold in_doubt,resend parked,w0 delivered,waiting parked");
    let sent = server.requests().len();
    let run = on(&site, &copy, &["run", "--drain"]);
    assert!(run.status.success(), "{}", log(&run));
    assert_eq!(server.requests().len(), sent, "nothing goes out by itself");
}

/// Another database at the same path: the lock file's word is not about it.
#[test]
fn a_new_database_in_the_place_of_another_one_starts() {
    let (server, _gate, site) = in_use();
    commands(&site, 0, 3);
    site.drain();
    for ending in ["", "-wal", "-shm"] {
        std::fs::remove_file(format!("{}{ending}", site.db().display())).unwrap();
    }
    assert!(site.command("init").output().unwrap().status.success());
    commands(&site, 0, 1);
    site.drain();
    assert_eq!(server.requests().len(), 4);
}

/// What a person reads in the lock file stays first, and the witness follows each commit.
#[test]
fn the_lock_file_says_who_and_how_far() {
    let (server, _gate, site) = in_use();
    commands(&site, 0, 3);
    let daemon: Daemon = site.start();
    server.wait_for(3);
    site.wait_for_state("w2", "delivered");
    let text = std::fs::read_to_string(site.dir.path().join("app.db.dispatcher.lock")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with(&format!("pid {} on ", daemon.pid())), "{text}");
    let uuid: String = site.value("SELECT uuid FROM outbox_meta");
    assert_eq!(lines[1], format!("database {uuid} epoch {:020} attempts {:020}", 1, 3));
    assert_eq!(lines.len(), 2);
    daemon.stop();
}

/// A backup can't take a name that SQLite or the dispatcher takes for its own beside the database.
#[test]
fn a_backup_takes_no_name_of_the_database_itself() {
    let site = Site::new();
    for ending in ["-journal", "-wal", "-shm", ".dispatcher.lock"] {
        let target = site.dir.path().join(format!("app.db{ending}"));
        let ran = site.command("backup").arg(&target).output().unwrap();
        assert!(!ran.status.success(), "{ending}");
        assert!(String::from_utf8_lossy(&ran.stderr).contains("app.db"), "{ending}");
    }
    site.webhook("w", "s", 1, "billing");
}
