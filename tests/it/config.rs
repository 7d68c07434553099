//! Configuration: layers, messages that say where and what to do, and no secret in any of them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use fencepost::config::{Config, ConfigError, LogFormat};
use fencepost::email::Tls;
use fencepost::rules::{Backoff, Jitter, OnUnknown};
use secrecy::ExposeSecret;

const HOUR: i64 = 3_600_000;

/// A configuration file in a directory of its own, and the environment that it is loaded with.
struct Case {
    directory: tempfile::TempDir,
    env: Vec<(&'static str, String)>,
}

impl Case {
    fn new(text: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("fencepost.toml"), text).unwrap();
        Self { directory, env: Vec::new() }
    }

    fn env(mut self, name: &'static str, value: &str) -> Self {
        self.env.push((name, value.to_owned()));
        self
    }

    fn file(self, name: &str, bytes: &[u8]) -> Self {
        std::fs::write(self.path(name), bytes).unwrap();
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn load(&self) -> Result<Config, ConfigError> {
        let env = |name: &str| self.env.iter().find(|(each, _)| *each == name).map(|(_, value)| value.clone());
        Config::load(Some(&self.path("fencepost.toml")), &env)
    }

    fn config(&self) -> Config {
        self.load().unwrap_or_else(|error| panic!("{error}"))
    }

    /// Everything that a program could print of the error: the text, its sources, its `Debug` form.
    fn error(&self) -> String {
        let error = self.load().expect_err("the configuration is wrong");
        let mut text = format!("{error}\n{error:?}");
        let mut source = std::error::Error::source(&error);
        while let Some(each) = source {
            text.push_str(&format!("\n{each}\n{each:?}"));
            source = each.source();
        }
        text
    }
}

#[track_caller]
fn assert_error(text: &str, parts: &[&str]) {
    let error = Case::new(text).error();
    for part in parts {
        assert!(error.contains(part), "{part:?} is missing for {text:?}:\n{error}");
    }
}

#[test]
fn without_a_file_there_are_the_defaults() {
    let config = Config::load(None, &|_| None).unwrap();
    assert_eq!(config.database, None);
    assert_eq!(config.dispatcher.max_in_flight, 64);
    assert_eq!(config.dispatcher.poll_interval, Duration::from_millis(250));
    assert_eq!(config.dispatcher.drain_timeout, Duration::from_secs(30));
    assert_eq!(config.dispatcher.busy_timeout, Duration::from_secs(5));
    assert_eq!((config.log.level, config.log.format), (tracing::Level::INFO, LogFormat::Text));
    assert!(config.webhooks.is_empty() && config.emails.is_empty() && config.webhook_urls.is_none());
    assert!(config.warnings.is_empty());
}

#[test]
fn a_webhook_has_the_documented_defaults() {
    let case = Case::new("[webhook.billing]\nurl = \"https://billing.example.com/hooks\"\nsecrets = []");
    let config = case.config();
    let webhook = &config.webhooks["billing"];
    assert_eq!(webhook.settings.url.as_ref().unwrap().as_str(), "https://billing.example.com/hooks");
    assert!(webhook.settings.secrets.is_empty());
    assert_eq!(webhook.settings.connect_timeout, Duration::from_secs(10));
    assert_eq!(webhook.settings.read_timeout, Duration::from_secs(20));
    assert_eq!(webhook.settings.timeout, Duration::from_secs(30));
    assert!(webhook.settings.allow_networks.is_empty() && webhook.settings.effect_free_status.is_empty());
    assert_eq!(webhook.settings.ca_file, None);
    assert_eq!(webhook.max_in_flight, 16);
    assert_eq!(webhook.limits.on_unknown, OnUnknown::Resend);
    assert_eq!(webhook.limits.max_attempts, 40);
    assert_eq!((webhook.limits.max_age_ms, webhook.limits.resend_window_ms), (20 * HOUR, 24 * HOUR));
    assert_eq!(webhook.limits.backoff, Backoff { base_ms: 5_000, cap_ms: HOUR, jitter: Jitter::Full });
    assert_eq!(config.webhooks.len() + config.emails.len(), 1, "examples are no destinations");
}

#[test]
fn a_relay_has_the_documented_defaults() {
    let config = Case::new("[email.main]\nhost = \"smtp.example.com\"").config();
    let email = &config.emails["main"];
    assert_eq!((email.settings.host.as_str(), email.settings.port), ("smtp.example.com", 587));
    assert_eq!(email.settings.tls, Tls::Starttls);
    assert!(email.settings.login.is_none() && !email.settings.allow_plaintext);
    assert_eq!(email.settings.helo_name, "[127.0.0.1]");
    let timeouts = email.settings.timeouts;
    let minutes = |n: u64| Duration::from_secs(60 * n);
    assert_eq!((timeouts.connect, timeouts.greeting), (Duration::from_secs(30), minutes(5)));
    assert_eq!((timeouts.command, timeouts.body, timeouts.final_dot), (minutes(5), minutes(3), minutes(10)));
    assert_eq!(email.max_in_flight, 8);
    assert_eq!((email.limits.on_unknown, email.limits.max_attempts), (OnUnknown::Hold, 40));
    assert_eq!((email.limits.max_age_ms, email.limits.resend_window_ms), (72 * HOUR, 24 * HOUR));
    let backoff = Backoff { base_ms: 300_000, cap_ms: 4 * HOUR, jitter: Jitter::UpToHalfMore };
    assert_eq!(email.limits.backoff, backoff);
}

/// The port goes with the protection, unless it is given.
#[test]
fn implicit_tls_has_its_own_port() {
    for (settings, port) in [
        ("tls = \"implicit\"", 465),
        ("tls = \"implicit\"\nport = 2465", 2465),
        ("tls = \"opportunistic\"", 587),
        ("tls = \"none\"\nport = 25", 25),
    ] {
        let config = Case::new(&format!("[email.main]\nhost = \"smtp.example.com\"\n{settings}")).config();
        assert_eq!(config.emails["main"].settings.port, port, "{settings}");
    }
}

/// A user's value goes before the default, one key at a time, also inside inline tables; the
/// environment goes before the file.
#[test]
fn layers_lie_over_each_other() {
    let text = "[database]\npath = \"app.db\"\n[dispatcher]\nmax_in_flight = 3\n[log]\nlevel = \"warn\"\n\
        [webhook.a]\nurl = \"https://example.com\"\nsecrets = []\nbackoff = { cap = \"2m\" }\non_unknown = \"hold\"\n\
        allow_networks = [\"127.0.0.0/8\", \"::1\"]\neffect_free_status = [409, 503]\n\
        [webhook_urls]\nsecrets = []\nmax_in_flight = 2\n\
        [email.b]\nhost = \"192.0.2.25\"\ntimeouts = { final_dot = \"20m\" }";
    let case = Case::new(text);
    let config = case.config();
    assert_eq!(config.database, Some(case.path("app.db")), "relative to the file");
    assert_eq!(config.dispatcher.max_in_flight, 3);
    assert_eq!(config.dispatcher.poll_interval, Duration::from_millis(250));
    assert_eq!((config.log.level, config.log.format), (tracing::Level::WARN, LogFormat::Text));
    let webhook = &config.webhooks["a"];
    assert_eq!((webhook.limits.backoff.base_ms, webhook.limits.backoff.cap_ms), (5_000, 120_000));
    assert_eq!(webhook.limits.on_unknown, OnUnknown::Hold);
    let networks: Vec<_> = webhook.settings.allow_networks.iter().map(ToString::to_string).collect();
    assert_eq!(networks, ["127.0.0.0/8", "::1/128"]);
    assert_eq!(webhook.settings.effect_free_status, [409, 503]);
    let urls = config.webhook_urls.as_ref().unwrap();
    assert_eq!((urls.settings.url.as_ref(), urls.max_in_flight), (None, 2));
    assert_eq!(config.emails["b"].settings.timeouts.final_dot, Duration::from_secs(1200));
    assert_eq!(config.emails["b"].settings.timeouts.greeting, Duration::from_secs(300));

    let case = case.env("FENCEPOST_DB", "other.db").env("FENCEPOST_LOG_LEVEL", "debug");
    let config = case.env("FENCEPOST_LOG_FORMAT", "json").config();
    assert_eq!(config.database.as_deref(), Some(Path::new("other.db")));
    assert_eq!((config.log.level, config.log.format), (tracing::Level::DEBUG, LogFormat::Json));
}

/// Whoever copies the example gets a configuration that works, once its secrets are there.
#[test]
fn the_example_is_a_configuration() {
    let case = Case::new(fencepost::config::EXAMPLE).env("BILLING_SECRET", "whsec_AAAA").env("SMTP_PASSWORD", "p");
    let config = case.config();
    assert_eq!(config.webhooks.keys().chain(config.emails.keys()).collect::<Vec<_>>(), ["example", "example"]);
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
}

#[test]
fn an_unknown_key_shows_its_line_and_column() {
    let case = Case::new("[log]\nlevel = \"info\"\n\n[webhook.billing]\nsecretz = 1\n");
    let error = case.load().expect_err("secretz is unknown").to_string();
    let place = format!("{}:5:1: webhook.billing", case.path("fencepost.toml").display());
    assert!(error.starts_with(&place) && error.contains(": unknown field `secretz`, expected one of"), "{error}");
    assert!(error.contains("\n5 | secretz = 1\n  | ^^^^^^^"), "{error}");
    assert!(error.contains("`secrets`"), "the message lists what there is: {error}");
}

/// Each wrong value is named, with its place where it has one, and with what to do.
#[test]
fn each_bad_value_is_named() {
    let webhook = |line: &str| format!("[webhook.a]\nurl = \"https://example.com\"\nsecrets = []\n{line}");
    let email = |line: &str| format!("[email.a]\nhost = \"smtp.example.com\"\n{line}");
    for (line, parts) in [
        ("timeout = 30", &["fencepost.toml:4:11:", "4 | timeout = 30", "with its unit"][..]),
        ("timeout = \"30\"", &[":4:11:", "timeout", "\"30\" is not a duration", "unit"]),
        ("timeout = \"0s\"", &[":4:11:", "timeout", "not positive"]),
        ("timeout = \"-5s\"", &[":4:11:", "timeout", "not positive"]),
        ("timeout = \"99999999h\"", &[":4:11:", "timeout", "too long"]),
        ("max_age = \"3 parsecs\"", &[":4:11:", "max_age", "not a duration"]),
        ("backoff = { base = \"x\" }", &[":4:20:", "base", "not a duration"]),
        ("backoff = { base = \"5m\", cap = \"1m\" }", &[":4:1: webhook.a.backoff: ", "raise cap"]),
        ("max_attempts = 0", &[":4:16:", "max_attempts", "nonzero"]),
        ("max_attempts = -1", &[":4:16:", "max_attempts"]),
        ("max_in_flight = 0", &[":4:17:", "max_in_flight", "nonzero"]),
        ("on_unknown = \"probe\"", &[":4:14:", "on_unknown", "later version", "\"hold\""]),
        ("on_unknown = \"retry\"", &[":4:14:", "on_unknown", "\"retry\" is not one of"]),
        ("on_dead = \"stop\"", &[":4:11:", "on_dead", "block"]),
        ("allow_networks = [\"local\"]", &[":4:19:", "allow_networks", "\"10.0.0.0/8\""]),
        ("effect_free_status = [200]", &[":4:", "effect_free_status", "409"]),
        ("effect_free_status = [99999]", &[":4:", "effect_free_status", "409"]),
        ("on_unknown = \"hold\"\non_unknown = \"hold\"", &[":5:1:", "on_unknown", "duplicate"]),
    ] {
        assert_error(&webhook(line), parts);
    }
    for (line, parts) in [
        ("tls = \"ssl\"", &[":3:7:", "tls", "\"ssl\" is not one of"][..]),
        ("port = 0", &[":3:8:", "port", "nonzero"]),
        ("port = 70000", &[":3:8:", "port"]),
        ("helo_name = \"a b\"", &[":3:1: email.a.helo_name: ", "without spaces"]),
        ("username = \"app\"", &[":1:8: email.a.password: ", "both or neither"]),
        ("password = { env = \"X\" }", &["email.a.username", "both or neither"]),
        ("username = \"a\"\npassword = { env = \"X\" }\ntls = \"none\"", &[":5:1: email.a.tls: ", "clear text"]),
        ("username = \"a\"\npassword = { env = \"X\" }", &[":4:1: email.a.password: ", "variable X is not set"]),
        (
            "username = \"a\"\npassword = { file = \"no\" }",
            &[":4:1: email.a.password: ", "can't read the secret from", "/no"],
        ),
        ("username = \"a\"\npassword = { credential = \"p\" }", &["email.a.password", "CREDENTIALS_DIRECTORY"]),
        ("password = { env = \"X\", file = \"y\" }", &[":3:", "password", "one of env, file and credential"]),
        ("password = { evn = \"X\" }", &[":3:14:", "unknown field `evn`"]),
        ("timeouts = { dot = \"1s\" }", &[":3:14:", "unknown field `dot`"]),
    ] {
        assert_error(&email(line), parts);
    }
    for (text, parts) in [
        ("[webhook.a]\nsecrets = []", &["fencepost.toml:1:10: webhook.a.url: not set"][..]),
        ("[webhook.a]\nurl = \"https://example.com\"", &["webhook.a.secrets", "not set", "[] to send unsigned"]),
        ("[webhook.a]\nurl = \"ftp://example.com\"", &[":2:7:", "https://"]),
        ("[webhook.a]\nurl = \"/hooks\"", &[":2:7:", "not a URL"]),
        ("[webhook_urls]\nsecrets = []\nurl = \"https://example.com\"", &[":3:1: webhook_urls.url: ", "remove"]),
        ("[webhook.\"\"]\nsecrets = []", &[":1:10: webhook.\"\": ", "name of a destination"]),
        ("[email.a]\nport = 25", &["email.a.host", "not set"]),
        ("[log]\nlevel = \"loud\"", &[":2:9:", "level", "\"loud\" is not one of"]),
        ("[log]\nformat = \"xml\"", &[":2:10:", "format", "\"json\""]),
        ("[dispatcher]\npoll_interval = \"0ms\"", &[":2:17:", "poll_interval", "not positive"]),
        ("[dispatcher\n", &["fencepost.toml:1:"]),
        ("[sql]\n", &[":1:2:", "unknown field `sql`"]),
    ] {
        assert_error(text, parts);
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let error = Config::load(Some(Path::new("/no/such/fencepost.toml")), &|_| None).expect_err("no such file");
    assert!(matches!(&error, ConfigError::File { path, .. } if path == Path::new("/no/such/fencepost.toml")));
    assert!(error.to_string().contains("/no/such/fencepost.toml"));

    let case = Case::new("").file("fencepost.toml", b"[log]\nlevel = \"\xff\"\n");
    assert!(case.error().contains("utf-8"), "{}", case.error());

    let case = Case::new("").env("FENCEPOST_LOG_LEVEL", "loud");
    assert!(case.error().starts_with("FENCEPOST_LOG_LEVEL: \"loud\""), "{}", case.error());
}

/// A secret comes from a variable, a file or systemd, and one newline at its end is the editor's.
#[test]
fn secrets_are_read_at_load() {
    let text = "[webhook.a]\nurl = \"https://example.com\"\n\
        secrets = [{ env = \"NEW\" }, { file = \"old.secret\" }, { credential = \"older\" }]\n\
        [email.b]\nhost = \"smtp.example.com\"\nusername = \"app\"\npassword = { file = \"pw\" }";
    let case = Case::new(text).env("NEW", "whsec_AAAA").file("old.secret", b"whsec_BBBB\n").file("pw", b" p w \r\n");
    std::fs::create_dir(case.path("credentials")).unwrap();
    let case = case.file("credentials/older", b"whsec_CCCC");
    let directory = case.path("credentials").display().to_string();
    let config = case.env("CREDENTIALS_DIRECTORY", &directory).config();
    let secrets: Vec<_> = config.webhooks["a"].settings.secrets.iter().map(ExposeSecret::expose_secret).collect();
    assert_eq!(secrets, ["whsec_AAAA", "whsec_BBBB", "whsec_CCCC"]);
    assert_eq!(config.emails["b"].settings.login.as_ref().unwrap().password.expose_secret(), " p w ");
}

#[test]
fn an_unusable_secret_is_named_and_not_shown() {
    let text = "[webhook.a]\nurl = \"https://example.com\"\nsecrets = [{ file = \"s\" }]";
    let huge = [b'x'; 70_000];
    for (bytes, part) in [
        (&b""[..], "is empty"),
        (b"\n", "is empty"),
        (b"s3cr3t-Whsec\ns3cr3t-Whsec\n", "second line"),
        (b"s3cr3t-Whsec\xff", "not UTF-8"),
        (&huge, "too large"),
    ] {
        let error = Case::new(text).file("s", bytes).error();
        assert!(error.contains("webhook.a.secrets") && error.contains(part), "{error}");
        assert!(!error.contains("s3cr3t") && !error.contains("xxx"), "{error}");
    }
}

#[test]
fn unwise_windows_are_warned_about() {
    let text = "[webhook.a]\nurl = \"https://example.com\"\nsecrets = []\nmax_age = \"24h\"\n\
        [webhook.b]\nurl = \"https://example.com\"\nsecrets = []\nmax_age = \"24h\"\non_unknown = \"hold\"\n\
        [webhook_urls]\nsecrets = []\nresend_window = \"1h\"";
    let warnings = Case::new(text).config().warnings;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].starts_with("webhook.a: ") && warnings[1].starts_with("webhook_urls: "), "{warnings:?}");
}

/// H55: a literal secret is refused, and neither the message nor the line that it shows repeats it,
/// however the line is broken.
#[test]
fn h55_a_wrong_line_does_not_show_its_secret() {
    const REFUSED: &str = "never stands in clear text";
    for (text, part) in [
        ("[webhook.a]\nsecrets = [\"s3cr3t-Whsec\"]", REFUSED),
        ("[webhook.a]\nsecrets = \"s3cr3t-Whsec\"", REFUSED),
        ("[webhook.a]\nsecrets = [{ env = \"whsec_s3cr3t\" }]", "never the secret itself"),
        ("[webhook.a]\nsecrets = [{ env = \"s3cr3t-Whsec\" }]", "never the secret itself"),
        ("[email.a]\npassword = \"s3cr3t-Smtp\"", REFUSED),
        ("[email.a]\npassword = 19283746", REFUSED),
        ("[email.a]\npassword = 1928.3746", REFUSED),
        ("[email.a]\npassword = s3cr3t-Smtp", "string"),
        ("[email.a]\npassword = \"s3cr3t-Smtp", "string"),
        ("[email.a]\npassword = 's3cr3t-Smtp' oops", ""),
        ("[email.a]\npassword = \"\"\"\ns3cr3t-Smtp\\q\"\"\"", "escape"),
        ("[email.a]\npasswrod = \"s3cr3t-Smtp\" # s3cr3t-Smtp", "unknown field `passwrod`"),
        ("[email.a]\npassword = { env = 1 } # was s3cr3t-Smtp", "string"),
        ("[webhook.a]\nurl = \"example.com/?token=s3cr3t-Query\"", "not a URL"),
        ("[webhook.a]\nurl = \"ftp://hook:s3cr3t-User@example.com\"", "https://"),
        ("[webhook.a]\nurl = [\"https://example.com/s3cr3t-Path\"]", "a URL"),
        ("[webhook.a]\nurk = \"https://example.com/s3cr3t-Path\"", "unknown field `urk`"),
    ] {
        let error = Case::new(text).error();
        assert!(error.contains(part) && error.contains("fencepost.toml:"), "{text}\n{error}");
        assert!(!error.contains("s3cr3t") && !error.contains("3746"), "{text}\n{error}");
    }
}

/// H55: nothing that prints a configuration prints a secret, but each shows where it came from.
#[test]
fn h55_no_rendering_shows_a_secret() {
    let text = "[webhook.a]\nurl = \"https://no-such-host.invalid/h?token=s3cr3t-Query&x=1\"\n\
        secrets = [{ env = \"A_SECRET\" }, { file = \"a.secret\" }]\n\
        [webhook.b]\nurl = \"http://hook:s3cr3t-User@127.0.0.1:1/h\"\nsecrets = []\n\
        [webhook.c]\nurl = \"https://expired.test/services/T000/B000/s3cr3t-Path\"\nsecrets = []\n\
        [webhook.d]\nurl = \"https://chat.test/bot1:s3cr3t-Path/send\"\nsecrets = []\n\
        [webhook.e]\nurl = \"https://topic.test/s3cr3t-Path\"\nsecrets = []\n\
        [email.main]\nhost = \"mail.test\"\nusername = \"mailer\"\npassword = { env = \"SMTP_PASSWORD\" }";
    let case = Case::new(text).env("A_SECRET", "s3cr3t-Whsec").env("SMTP_PASSWORD", "s3cr3t-Smtp");
    let config = case.file("a.secret", b"s3cr3t-Whsec").config();
    let toml = config.to_toml();
    let texts = [
        toml.clone(),
        config.to_json().to_string(),
        format!("{config:?} {config:#?}"),
        format!("{:?} {:?} {:?}", config.webhooks, config.webhook_urls, config.emails),
    ];
    for text in &texts {
        for secret in ["s3cr3t", "czNjcjN0", "T000", "token="] {
            assert!(!text.contains(secret), "{secret} in {text}");
        }
    }
    for part in [
        "[redacted, from env A_SECRET]",
        "a.secret]",
        "[redacted, from env SMTP_PASSWORD]",
        "\"https://no-such-host.invalid/…\"",
        "\"http://127.0.0.1:1/…\"",
        "\"https://expired.test/services/…\"",
        "\"https://chat.test/…\"",
        "\"https://topic.test/…\"",
        "max_age = \"20h\"",
        "username = \"mailer\"",
    ] {
        assert!(toml.contains(part), "{part} is not in\n{toml}");
    }
}
