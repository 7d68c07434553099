"""A worker in Python, with nothing but the standard library.

    python3 examples/worker.py app.db      works on that database; without a path on a fresh one

A business write and a command in one transaction, under a lease. Nothing is sent here: the command
waits for `fencepost run`.
"""

import contextlib
import pathlib
import re
import sqlite3
import sys
import tempfile
import uuid

SCHEMA = pathlib.Path(__file__).resolve().parent.parent / "schema.sql"
CODE = re.compile(r"\bFP0\d\d\b")


def connect(path):
    # isolation_level=None: this program, not the driver, says BEGIN and COMMIT.
    db = sqlite3.connect(path, isolation_level=None, timeout=5)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'outbox_meta'").fetchone() is None:
        db.executescript("BEGIN IMMEDIATE;\n" + SCHEMA.read_text(encoding="utf-8") + "\nCOMMIT;")
    db.execute("CREATE TABLE IF NOT EXISTS payments(account TEXT NOT NULL, cents INTEGER NOT NULL)")
    return db


@contextlib.contextmanager
def transaction(db):
    """BEGIN IMMEDIATE … COMMIT. After any error the whole transaction is over, and so is the block.

    A refusal has rolled back already and left the connection outside of any transaction, where the next
    statement would commit by itself: so never catch an error inside the block.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def code(error):
    """The code of the contract in an error, or None."""
    found = CODE.search(str(error))
    return found.group() if found else None


def acquire(db, scope):
    holder = str(uuid.uuid4())  # one acquisition, one holder
    with transaction(db):
        db.execute("INSERT INTO outbox_acquire(scope, holder, ttl_ms) VALUES (?, ?, 30000)", (scope, holder))
        (token,) = db.execute("SELECT token FROM outbox_lease WHERE scope = ? AND holder = ?", (scope, holder)).fetchone()
        backlog = db.execute("SELECT id, state FROM outbox_backlog WHERE scope = ?", (scope,)).fetchall()
    return token, holder, backlog


def release(db, scope, token, holder):
    with transaction(db):
        db.execute("INSERT INTO outbox_release(scope, token, holder) VALUES (?, ?, ?)", (scope, token, holder))


def pay(db, scope, token, holder):
    """Fence first, business writes next, the command last."""
    with transaction(db):
        db.execute("INSERT INTO outbox_fence(scope, token, holder) VALUES (?, ?, ?)", (scope, token, holder))
        db.execute("INSERT INTO payments(account, cents) VALUES ('acct-7', 4200)")
        db.execute(
            "INSERT INTO outbox(scope, token, holder, kind, destination, payload) VALUES (?, ?, ?, 'webhook', 'billing', ?)",
            (scope, token, holder, '{"paid":true}'),
        )


def main(path):
    db = connect(path)
    before = db.execute("SELECT count(*) FROM payments").fetchone()[0]
    token, holder, backlog = acquire(db, "order/17")
    print(f"acquired order/17 with token {token}, {len(backlog)} commands inherited")
    pay(db, "order/17", token, holder)
    print("paid, and the webhook is queued in the same transaction")

    # Somebody else takes over while we are paused; when we wake up, the database refuses us.
    release(db, "order/17", token, holder)
    newer, newer_holder, _ = acquire(db, "order/17")
    try:
        pay(db, "order/17", token, holder)
    except sqlite3.IntegrityError as error:
        if code(error) != "FP001":
            raise
        current, whose = db.execute("SELECT token, holder FROM outbox_lease WHERE scope = 'order/17'").fetchone()
        print(f"refused: {error}: ours is {token}, {current} is held by {whose}")
    else:
        return "a stale worker was let in"
    release(db, "order/17", newer, newer_holder)
    payments = db.execute("SELECT count(*) FROM payments").fetchone()[0] - before
    print(f"{payments} payment(s) in {path}")
    return 0 if payments == 1 else "the refused payment is in"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(sys.argv[1]))
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(main(pathlib.Path(directory) / "app.db"))
