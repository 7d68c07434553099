//! Negative controls: each rule of the dispatcher is switched off in turn, and the promise that it keeps
//! is seen to break. A test of the same promise that stays green then would test nothing. (The guards of
//! the SQL contract have theirs in `mutants`, the rules of a command in `rules::tests`.)

use std::os::unix::process::ExitStatusExt;

use crate::support::daemon::{Site, relay, webhook};
use crate::support::http::{Gate, Reply, Server};
use crate::support::{smtp, wait_until};

/// Without the arm a mail whose bytes are out looks as if nothing had left: it goes out twice, and nobody
/// knows (S7, S11). With it, it is in doubt.
#[test]
fn without_arm_a_mail_goes_out_twice_unknowingly() {
    for (broken, arrivals, state) in [("arm", 2, "delivered"), ("nothing", 1, "in_doubt")] {
        let server = smtp::Server::start(smtp::Script::new());
        let site = Site::new();
        site.configure(&relay("main", server.port(), ""));
        site.email("m", "s", 1, "main");
        site.killed_at("sent", "main", &[("FENCEPOST_BREAK", broken)]);
        site.drain();
        assert_eq!((server.mails().len(), site.status("m").state.as_str()), (arrivals, state), "without {broken}");
    }
}

/// Without the lock two dispatchers run, and the first one's attempt is repeated while it is open.
#[test]
fn without_the_lock_two_dispatchers_send_at_once() {
    for (broken, arrivals) in [("lock", 2), ("nothing", 1)] {
        let (gate, server) = Server::held();
        let site = Site::new();
        site.configure(&webhook("billing", &server.url(), ""));
        site.webhook("w", "s", 1, "billing");
        let first = site.start();
        server.wait_for(1);
        let second = site.run_with(&[], &[("FENCEPOST_BREAK", broken)]);
        match broken {
            "lock" => {
                server.wait_for(2);
                second.kill();
            }
            _ => assert_eq!(second.wait().code(), Some(75)),
        }
        gate.open();
        assert_eq!(server.requests().len(), arrivals, "without {broken}");
        first.kill();
    }
}

/// Without the epoch a deposed dispatcher goes on: it begins what its successor owns (S16).
#[test]
fn without_the_epoch_a_deposed_dispatcher_goes_on() {
    for (broken, state) in [("epoch", "delivered"), ("nothing", "pending")] {
        let server = Server::start(|_| Reply::status(200));
        let site = Site::new();
        site.configure(&webhook("billing", &server.url(), ""));
        let daemon = site.run_with(&[], &[("FENCEPOST_BREAK", broken)]);
        daemon.wait_for_log("dispatching");
        site.sql("UPDATE outbox_dispatcher SET epoch = epoch + 1");
        site.webhook("w", "s", 1, "billing");
        match broken {
            "epoch" => {
                // Its settle is refused by the attempt's own condition on the epoch, its send is not.
                server.wait_for(1);
                daemon.kill();
            }
            _ => {
                assert_eq!(daemon.wait().code(), Some(75));
                assert!(server.requests().is_empty());
                assert_eq!(site.status("w").state, state);
            }
        }
    }
}

/// Without suspects, the neighbours of a command that kills the process die with it.
#[test]
fn without_suspects_neighbours_die_with_a_killer() {
    for (broken, neighbour) in [("suspects", "dead/exhausted"), ("nothing", "delivered")] {
        let gate = Gate::new();
        let held = gate.clone();
        let healthy = Server::start(move |request| {
            let attempt: u32 = request.header("Fencepost-Attempt").unwrap().parse().unwrap();
            if attempt <= 2 {
                Reply::status(200).held_by(&held)
            } else {
                Reply::status(200).after(std::time::Duration::from_millis(300))
            }
        });
        let killer = Server::start(|_| Reply::status(200));
        let site = Site::new();
        site.configure(&format!(
            "{}{}",
            webhook("billing", &healthy.url(), "max_attempts = 5"),
            webhook("killer", &killer.url(), "max_attempts = 5"),
        ));
        site.webhook("w", "w", 1, "billing");
        site.webhook("k", "k", 1, "killer");
        let done =
            || site.statuses().iter().all(|status| status.state == "delivered" || status.state.starts_with("dead"));
        for start in 1.. {
            assert!(start < 12, "it died too often");
            let mut daemon =
                site.run_with(&[], &[("FENCEPOST_FAULT", "sent:killer:kill"), ("FENCEPOST_BREAK", broken)]);
            let mut up = true;
            wait_until("it dies or is done", 60, || {
                up = daemon.is_running();
                !up || done()
            });
            if up {
                break;
            }
        }
        assert_eq!(site.status("w").state, neighbour, "without {broken}");
        gate.open();
    }
}

/// Without counting what a start found open, a command that kills the process is tried for ever (H15).
#[test]
fn without_counting_a_killer_never_ends() {
    for (broken, state) in [("count", "sending"), ("nothing", "dead/exhausted")] {
        let server = Server::start(|_| Reply::status(200));
        let site = Site::new();
        site.configure(&webhook("killer", &server.url(), "max_attempts = 3"));
        site.webhook("k", "k", 1, "killer");
        for _ in 0..3 {
            site.killed_at("sent", "killer", &[("FENCEPOST_BREAK", broken)]);
        }
        let daemon =
            site.run_with(&["--drain"], &[("FENCEPOST_FAULT", "sent:killer:kill"), ("FENCEPOST_BREAK", broken)]);
        assert_eq!(daemon.wait().signal(), if broken == "count" { Some(9) } else { None }, "without {broken}");
        assert_eq!(site.status("k").state, state, "without {broken}");
    }
}
