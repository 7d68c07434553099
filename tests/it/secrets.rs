//! H55: no secret in a log, an evidence, a listing or an error, whatever fails and whatever the log level.

use crate::support::daemon::Site;
use crate::support::http::{Reply, Server};
use crate::support::smtp;

const SECRETS: [&str; 6] =
    ["s3cr3t-Query", "s3cr3t-User", "s3cr3t-Path", "s3cr3t-Smtp", "czNjcjN0LVdoc2VjLWZvci1maXhlZA", "s3cr3t-Bearer"];

/// Each secret as it is, percent-encoded, and in base64 at each of the three offsets.
fn needles() -> Vec<String> {
    use base64::Engine as _;
    let encode = |text: &str| base64::engine::general_purpose::STANDARD_NO_PAD.encode(text);
    let mut all = Vec::new();
    for secret in SECRETS {
        all.push(secret.to_owned());
        all.push(secret.replace('-', "%2D"));
        all.push(secret.replace('-', "%2d"));
        for offset in 0..3 {
            let whole = encode(&format!("{}{secret}", &"xxx"[..offset]));
            // The first and last characters mix with what stands around.
            all.push(whole[if offset == 0 { 0 } else { offset + 1 }..whole.len() - 2].to_owned());
        }
    }
    all.push(encode("\0mailer\0s3cr3t-Smtp"));
    all
}

fn assert_silent(what: &str, text: &str) {
    for needle in needles() {
        assert!(!text.contains(&needle), "{what} shows {needle}:\n{text}");
    }
}

#[test]
fn h55_no_secret_is_shown_anywhere() {
    let (gate, slow) = Server::held();
    let failing = Server::start(|_| Reply::status(500).body("echo: s3cr3t-Query"));
    let moved =
        Server::start(|_| Reply::status(302).header("Location", "http://elsewhere.example/x?token=s3cr3t-Query"));
    let login = smtp::Server::start_tls(
        smtp::Script::new().offer("AUTH PLAIN LOGIN").login("someone", "else"),
        smtp::TlsMode::Implicit,
    );
    let port = |server: &Server| server.port();
    let site = Site::new();
    let certificate = site.dir.path().join("ca.pem");
    login.write_certificate(&certificate);
    let hook = |name: &str, url: &str| {
        format!(
            "[webhook.{name}]\nurl = \"{url}\"\nsecrets = [{{ env = \"HOOK_SECRET\" }}]\nallow_networks = [\"127.0.0.0/8\"]\n\
             timeout = \"500ms\"\nread_timeout = \"500ms\"\nmax_attempts = 2\nbackoff = {{ base = \"20ms\", cap = \"20ms\" }}\n"
        )
    };
    site.configure(&format!(
        "[log]\nlevel = \"trace\"\n{}{}{}{}{}{}[webhook_urls]\nsecrets = []\n[email.main]\nhost = \"localhost\"\nport = {}\n\
         tls = \"implicit\"\nca_file = \"ca.pem\"\nusername = \"mailer\"\npassword = {{ env = \"SMTP_SECRET\" }}\n\
         backoff = {{ base = \"20ms\", cap = \"20ms\" }}\n",
        hook("dns", "https://no-such-host.invalid/h?token=s3cr3t-Query&x=1"),
        hook("refused", "http://127.0.0.1:1/services/T000/B000/s3cr3t-Path"),
        hook("tls", &format!("https://127.0.0.1:{}/services/T000/B000/s3cr3t-Path", port(&failing))),
        hook("slow", &format!("http://127.0.0.1:{}/h?sig=s3cr3t-Query#frag", port(&slow))),
        hook("moved", &format!("http://127.0.0.1:{}/s3cr3t-Path/h?sig=s3cr3t-Query", port(&moved))),
        hook("failing", &format!("http://127.0.0.1:{}/h?sig=s3cr3t-Query", port(&failing))),
        login.port(),
    ));
    for destination in ["dns", "refused", "tls", "slow", "moved", "failing"] {
        site.sql(&format!(
            "INSERT INTO outbox(id, scope, token, kind, destination, headers, payload) VALUES ('{destination}', '{destination}', 1,
             'webhook', '{destination}', '{{\"Authorization\":\"Bearer s3cr3t-Bearer\"}}', '{{\"x\":\"s3cr3t-Bearer\"}}')"
        ));
    }
    site.sql(
        "INSERT INTO outbox(id, scope, token, kind, destination, payload) VALUES
         ('user', 'user', 1, 'webhook', 'http://hook:s3cr3t-User@127.0.0.1:1/h', '{}'),
         ('query', 'query', 1, 'webhook', 'http://127.0.0.1:1/h?token=s3cr3t-Query', '{}'),
         ('host', 'host', 1, 'webhook', 'http://no-such-host.invalid/s3cr3t-Path/h?token=s3cr3t-Query', '{}')",
    );
    site.email("mail", "mail", 1, "main");
    let environment = [
        ("HOOK_SECRET", "whsec_czNjcjN0LVdoc2VjLWZvci1maXhlZC10ZXN0cw=="),
        ("SMTP_SECRET", "s3cr3t-Smtp"),
        ("RUST_LOG", "trace"),
    ];
    for format in [&["-vv"][..], &[]] {
        let daemon = site.run_with(format, &environment);
        daemon.wait_for_log("dispatching");
        for id in ["tls", "slow", "moved", "failing", "user", "query", "host", "refused", "dns", "mail"] {
            crate::support::wait_until(&format!("{id} was tried or has ended"), 30, || {
                let status = site.status(id);
                status.attempt_no > 0 && !site.evidence(id).is_empty() || status.state.starts_with("dead")
            });
        }
        daemon.signal(rustix::process::Signal::TERM);
        let log = std::sync::Arc::clone(&daemon.log);
        daemon.wait();
        let log = log.lock().unwrap().clone();
        assert!(log.contains("tried again") || log.contains("ended"), "{log}");
        assert_silent("the log", &log);
    }
    gate.open();
    let evidences: String = {
        let connection = site.connect();
        let mut statement = connection.prepare("SELECT coalesce(evidence, '') FROM outbox_attempt").unwrap();
        statement
            .query_map([], |row| row.get::<_, String>(0))
            .unwrap()
            .map(Result::unwrap)
            .collect::<Vec<_>>()
            .join("\n")
    };
    assert_silent("an evidence", &evidences);
    assert!(
        evidences.contains("127.0.0.1") && evidences.contains("no-such-host.invalid"),
        "enough to diagnose: {evidences}"
    );
    for arguments in [
        &["status"][..],
        &["status", "--json"],
        &["list"],
        &["list", "--json"],
        &["config", "check"],
        &["config", "show"],
        &["config", "show", "--json"],
    ] {
        let mut command = site.command(arguments[0]);
        let output = command.args(&arguments[1..]).envs(environment).output().unwrap();
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{arguments:?}: {text}");
        assert_silent(&format!("{arguments:?}"), &text);
    }
    for id in ["tls", "slow", "moved", "failing", "user", "query", "host", "refused", "dns", "mail"] {
        for json in [&[][..], &["--json"]] {
            let output = site.command("show").arg(id).args(json).output().unwrap();
            assert!(output.status.success());
            assert_silent(&format!("show {id}"), &String::from_utf8_lossy(&output.stdout));
        }
    }
    // A setting that is wrong is named without its value.
    site.configure("[webhook.billing]\nurl = \"http://hook:s3cr3t-User@127.0.0.1/?x=s3cr3t-Query\"\nsecrets = [\"s3cr3t-Bearer\"]\n");
    let output = site.command("run").output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    assert_silent("a configuration error", &String::from_utf8_lossy(&output.stderr));
    assert!(slow.requests().iter().all(|request| request.header("Authorization") == Some("Bearer s3cr3t-Bearer")));
}
