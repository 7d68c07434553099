//! The examples do what they say, and so does the README's quick start.
//!
//! `cargo test` builds the examples before any test runs, so they are run from where it puts them.

use std::path::PathBuf;
use std::process::{Command, Output};

use crate::support::daemon::BINARY;
use crate::support::http::{self, Reply};
use crate::support::smtp::{self, Dot, Script, Stage, TlsMode};

/// The built example. A run of this test binary alone does not build it.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().parent().unwrap().join("examples").join(name);
    assert!(path.exists(), "{} is not there: run `cargo build --examples --features faults`", path.display());
    path
}

fn run(command: &mut Command) -> (Output, String) {
    let output = command.env_remove("SMTP_PASSWORD").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output, text)
}

#[test]
fn the_webhook_example_sends_signs_and_shows() {
    let server = http::Server::start_tls("server.pem", |_| Reply::status(200).body("thanks"));
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("kept.db");
    let (output, text) = run(Command::new(example("webhook"))
        .args([&format!("{}/hook", server.url()), "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"])
        .args(["--allow", "127.0.0.0/8", "--ca", http::test_root().to_str().unwrap()])
        .args(["--keep", kept.to_str().unwrap()]));
    assert!(output.status.success(), "{text}");
    for part in ["state    delivered, effect done\n", "attempt  1: delivered ", r#""status":200"#] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    let requests = server.requests();
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0].body, br#"{"paid":true}"#);
    let secret = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz";
    let mut headers = std::collections::HashMap::new();
    for name in ["webhook-id", "webhook-timestamp", "webhook-signature"] {
        headers.insert(name, requests[0].header(name).unwrap());
    }
    let signed = format!("{}.{}.{{\"paid\":true}}", headers["webhook-id"], headers["webhook-timestamp"]);
    assert_eq!(headers["webhook-signature"], signature(secret, &signed));
    // The database was kept, and an existing file is never taken.
    let (output, text) = run(Command::new(example("webhook")).args([&server.url(), "--keep", kept.to_str().unwrap()]));
    assert!(!output.status.success() && text.contains("exists"), "{text}");
}

/// Standard Webhooks, by hand: `v1,` and base64 of HMAC-SHA-256.
fn signature(secret: &str, signed: &str) -> String {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use hmac::{KeyInit as _, Mac as _};
    let key = STANDARD.decode(secret.trim_start_matches("whsec_")).unwrap();
    let mut mac = hmac::Hmac::<sha2::Sha256>::new_from_slice(&key).unwrap();
    mac.update(signed.as_bytes());
    format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
}

#[test]
fn the_webhook_example_says_what_was_refused() {
    let server = http::Server::start(|_| Reply::status(410).body("gone"));
    let (output, text) = run(Command::new(example("webhook")).args([&server.url(), "--allow", "127.0.0.0/8"]));
    assert!(output.status.success(), "{text}");
    assert!(text.contains("state    dead/refused, effect none\n") && text.contains(r#""status":410"#), "{text}");
    // The guard closes the loopback network unless it is opened.
    let (output, text) = run(Command::new(example("webhook")).arg(server.url()));
    assert!(output.status.success(), "{text}");
    assert!(text.contains("state    pending, effect none\n") && text.contains(r#""phase":"guard""#), "{text}");
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn the_email_example_sends_and_shows() {
    let server = smtp::Server::start(Script::new());
    let relay = format!("127.0.0.1:{}", server.port());
    let arguments = [&relay, "shop@example.com", "ann@example.org", "--tls", "none"];
    let (output, text) = run(Command::new(example("email")).args(arguments));
    assert!(output.status.success(), "{text}");
    assert!(text.contains("state    delivered, effect done\n") && text.contains(r#""code":250"#), "{text}");
    let mails = server.mails();
    assert_eq!(mails.len(), 1);
    assert_eq!(mails[0].header("subject").as_deref(), Some("Order 17"));
}

/// The final dot is not answered, and nobody can know: the policy is `hold`.
#[test]
fn the_email_example_ends_in_doubt_where_nobody_can_know() {
    let server = smtp::Server::start(Script::new().dots([Dot::Close]));
    let relay = format!("127.0.0.1:{}", server.port());
    let arguments = [&relay, "shop@example.com", "ann@example.org", "--tls", "none"];
    let (output, text) = run(Command::new(example("email")).args(arguments));
    assert!(output.status.success(), "{text}");
    assert!(text.contains("state    in_doubt, effect possible\n") && text.contains("attempt  1: unknown"), "{text}");
}

#[test]
fn the_email_example_logs_in_over_tls() {
    let script = Script::new().offer("AUTH PLAIN").login("app", "opensesame");
    let server = smtp::Server::start_tls(script, TlsMode::Starttls);
    let folder = tempfile::tempdir().unwrap();
    let roots = folder.path().join("root.pem");
    server.write_certificate(&roots);
    let mut command = Command::new(example("email"));
    command.args([&format!("127.0.0.1:{}", server.port()), "shop@example.com", "ann@example.org"]);
    command.args(["--user", "app", "--ca", roots.to_str().unwrap()]);
    let (output, text) = run(&mut command);
    assert!(!output.status.success() && text.contains("SMTP_PASSWORD"), "{text}");
    let output = command.env("SMTP_PASSWORD", "opensesame").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("state    delivered, effect done\n"), "{text} {output:?}");
    assert!(!text.contains("opensesame"), "{text}");
    // A wrong password is the channel's fault: the command waits and keeps its try.
    server.set_script(Script::new().offer("AUTH PLAIN").login("app", "other").reply(Stage::Quit, "221 bye"));
    let output = command.env("SMTP_PASSWORD", "opensesame").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("state    pending, effect none\n") && text.contains(r#""code":535"#), "{text}");
}

/// A device without a fence: what it says decides, and where it says nothing a person must look.
#[test]
fn the_actuator_example_opens_a_valve_and_shows() {
    for (device, state) in [
        ("deaf", "device   heard 0 bytes\n"),
        ("ok", "device   heard 12 bytes\n"),
        ("ok", "state    delivered, effect done\n"),
        ("busy", "state    pending, effect none\n"),
        ("err", "state    dead/refused, effect none\n"),
        ("mute", "state    in_doubt, effect possible\n"),
    ] {
        let (output, text) = run(Command::new(example("custom_effect")).args(["--device", device]));
        assert!(output.status.success() && text.contains(state), "{device}: {text}");
    }
    let (output, text) = run(Command::new(example("custom_effect")).args(["--valve", "tank 1"]));
    assert!(output.status.success() && text.contains("state    dead/invalid, effect none\n"), "{text}");
    // Nobody listens there: the channel's fault, and the try is given back.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let (output, text) = run(Command::new(example("custom_effect")).arg(free));
    assert!(output.status.success() && text.contains("state    pending, effect none\n"), "{text}");
}

#[test]
fn the_worker_example_runs() {
    let (output, text) = run(&mut Command::new(example("worker")));
    assert!(output.status.success(), "{text}");
}

/// The file that documents every setting is a configuration that loads, secrets included.
#[test]
fn the_example_configuration_loads() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/fencepost.toml");
    let secret = |name: &str| match name {
        "BILLING_SECRET" => Some("whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz".to_owned()),
        "SMTP_PASSWORD" => Some("opensesame".to_owned()),
        _ => None,
    };
    let config = fencepost::config::Config::load(Some(path.as_ref()), &secret).unwrap();
    assert_eq!(config.webhooks.keys().collect::<Vec<_>>(), ["example"]);
    assert_eq!(config.emails.keys().collect::<Vec<_>>(), ["example"]);
}

/// The README's quick start, line by line as it stands there, only on a free port.
#[test]
fn the_quick_start_of_the_readme_works() {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    let (_, after) = readme.split_once("<!-- quick start -->\n").expect("the README has a quick start");
    let blocks: Vec<&str> = after.split("```sh\n").skip(1).map(|part| part.split("```").next().unwrap()).collect();
    let script = blocks.first().unwrap();
    let port = |text: &str| {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        (text.to_owned(), format!("127.0.0.1:{}", free.local_addr().unwrap().port()))
    };
    let (http, smtp) = (port("127.0.0.1:8025"), port("127.0.0.1:2525"));
    let sink = format!("fencepost sink --http {} --smtp {}", http.1, smtp.1);
    let script = script.replace("fencepost sink", &sink).replace(&http.0, &http.1);
    let folder = tempfile::tempdir().unwrap();
    let binaries = PathBuf::from(BINARY).parent().unwrap().to_str().unwrap().to_owned();
    let path = format!("{binaries}:{}", std::env::var("PATH").unwrap());
    let output = Command::new("bash")
        .args(["-euc", &format!("trap 'kill ${{!:-}} 2> /dev/null || true' EXIT\n{script}")])
        .current_dir(folder.path())
        .env("PATH", path)
        .env_remove("FENCEPOST_CONFIG")
        .env_remove("FENCEPOST_DB")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}\n{text}");
    for part in ["1 pending", "1 delivered", "1 arrivals", "scope=order%2F17", "token=1"] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
}
