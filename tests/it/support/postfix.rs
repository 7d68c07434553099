//! A real Postfix for one test: a private instance with its own queue, mailboxes and log in a
//! temporary folder, which listens on a free port of 127.0.0.1 and relays nowhere.
//!
//! It needs the package `postfix` (3.4 or later) and root, since Postfix starts its processes under
//! several users. Where it is missing the test fails: a test that is skipped proves nothing.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The instance; it stops when this is dropped.
pub struct Postfix {
    folder: tempfile::TempDir,
    port: u16,
}

impl Postfix {
    /// Starts an instance with a mailbox for each of these users of `example.net`.
    pub fn start(users: &[&str]) -> Self {
        assert!(Path::new("/usr/sbin/postfix").exists(), "postfix is not installed: run scripts/test");
        assert!(rustix::process::geteuid().is_root(), "postfix starts as root only: run scripts/test as root");
        let folder = tempfile::Builder::new().prefix("postfix").tempdir().unwrap();
        // Its processes run under other users, who must get to their folders.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        for name in ["conf", "queue", "data", "mail", "log"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        own(&folder.path().join("data"), "postfix");
        own(&folder.path().join("mail"), "nobody");
        fs::write(folder.path().join("conf/main.cf"), main_cf(folder.path(), users)).unwrap();
        fs::write(folder.path().join("conf/master.cf"), master_cf(port)).unwrap();
        let postfix = Self { folder, port };
        let start = postfix.run("start");
        assert!(start.status.success(), "postfix does not start: {start:?}\n{}", postfix.log());
        postfix
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The mails in a user's mailbox, as Postfix wrote them.
    pub fn mails(&self, user: &str) -> Vec<String> {
        let folder: PathBuf = self.folder.path().join("mail").join(user).join("new");
        let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
        entries.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap()).collect()
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log/mail.log")).unwrap_or_default()
    }

    fn run(&self, action: &str) -> std::process::Output {
        Command::new("/usr/sbin/postfix").arg("-c").arg(self.folder.path().join("conf")).arg(action).output().unwrap()
    }
}

impl Drop for Postfix {
    fn drop(&mut self) {
        let stop = self.run("stop");
        if !stop.status.success() && !std::thread::panicking() {
            panic!("postfix does not stop: {stop:?}");
        }
    }
}

fn own(path: &Path, user: &str) {
    let status = Command::new("chown").arg(user).arg(path).status().unwrap();
    assert!(status.success(), "no user {user}");
}

fn main_cf(folder: &Path, users: &[&str]) -> String {
    let folder = folder.display();
    let mailboxes: Vec<String> = users.iter().map(|user| format!("{{ {user}@example.net = {user}/ }}")).collect();
    format!(
        "compatibility_level = 3.6
queue_directory = {folder}/queue
data_directory = {folder}/data
maillog_file = {folder}/log/mail.log
maillog_file_prefixes = {folder}
myhostname = mx.example.com
mydestination =
alias_maps =
inet_interfaces = 127.0.0.1
inet_protocols = ipv4
mynetworks = 127.0.0.1/32
smtpd_relay_restrictions = reject_unauth_destination
default_transport = error:nothing is relayed
relay_transport = error:nothing is relayed
virtual_mailbox_domains = example.net
virtual_mailbox_base = {folder}/mail
virtual_mailbox_maps = inline:{{ {} }}
virtual_uid_maps = static:65534
virtual_gid_maps = static:65534
local_header_rewrite_clients =
message_size_limit = 100000
",
        mailboxes.join(" ")
    )
}

fn master_cf(port: u16) -> String {
    let mut services = format!("127.0.0.1:{port} inet n - n - - smtpd\n");
    for (name, wakeup, limit, program) in [
        ("pickup", "60", "1", "pickup"),
        ("cleanup", "-", "0", "cleanup"),
        ("qmgr", "300", "1", "qmgr"),
        ("rewrite", "-", "-", "trivial-rewrite"),
        ("bounce", "-", "0", "bounce"),
        ("defer", "-", "0", "bounce"),
        ("trace", "-", "0", "bounce"),
        ("error", "-", "-", "error"),
        ("retry", "-", "-", "error"),
        ("anvil", "-", "1", "anvil"),
        ("proxymap", "-", "-", "proxymap"),
        ("virtual", "-", "-", "virtual"),
    ] {
        // Public where smtpd and postqueue have to reach it.
        let private = if ["pickup", "cleanup", "qmgr"].contains(&name) { "n" } else { "-" };
        let privileged = if name == "virtual" { "n" } else { "-" };
        services += &format!("{name} unix {private} {privileged} n {wakeup} {limit} {program}\n");
    }
    services + "postlog unix-dgram n - n - 1 postlogd\n"
}
