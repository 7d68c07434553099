"""Cases of the contract through Python's sqlite3: H07, H59, H60, H61, H66.

`tests/it/contract.rs` has the same tables for rusqlite; here another driver binds the values.
"""

import pathlib
import re
import sqlite3
import sys

CONTRACT = (pathlib.Path(__file__).resolve().parents[2] / "schema.sql").read_text(encoding="utf-8")
CODE = re.compile(r"\bFP0\d\d\b")


def fresh(**options):
    db = sqlite3.connect(":memory:", **{"isolation_level": None, **options})
    db.executescript("BEGIN;\n" + CONTRACT + "COMMIT;\nCREATE TABLE orders(note TEXT);")
    return db


def say(db, sql, values=()):
    """'ok', a code, or 'refused' for an error of SQLite or of the driver itself."""
    try:
        db.execute(sql, values).fetchall()
    except (sqlite3.Error, OverflowError) as error:
        found = CODE.search(str(error))
        if found and sys.version_info >= (3, 11):
            assert error.sqlite_errorcode == 1811, error
        return found.group() if found else "refused"
    return "ok"


def expect(right, found, what):
    assert found == right, f"{what}: {found!r}, not {right!r}"


INSERT = "INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',?,'webhook','billing','{}')"


def h07_tokens_bound_as_python_binds_them():
    db = fresh()
    for token, right, stored in [
        ("10", "ok", 10), ("9", "FP001", 10), (" 11", "ok", 11), ("11abc", "refused", 11), (11.0, "ok", 11),
        (11.5, "refused", 11), (b"\x0b", "refused", 11), (1e3, "ok", 1000), (True, "FP001", 1000),
        (2**63, "refused", 1000), (2**62, "FP012", 1000), (2**62 + 1, "FP003", 1000), (None, "FP003", 1000),
    ]:
        for insert in (INSERT, INSERT.replace("INSERT", "INSERT OR IGNORE")):
            expect(right, say(db, insert, (token,)), f"token {token!r}")
            expect((stored,), db.execute("SELECT token FROM outbox_lease").fetchone(), f"after {token!r}")


def h59_a_swallowed_refusal():
    for savepoint in (False, True):
        db = fresh()
        expect("ok", say(db, INSERT, (42,)), "the first")
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO orders VALUES('before')")
        if savepoint:
            db.execute("SAVEPOINT p")
        expect("FP001", say(db, INSERT, (41,)), "the stale one")
        expect(False, db.in_transaction, "in a transaction")
        if savepoint:
            expect("refused", say(db, "ROLLBACK TO p"), "ROLLBACK TO")
        db.execute("INSERT INTO orders VALUES('after')")
        expect("refused", say(db, "COMMIT"), "COMMIT")
        expect([("after",)], db.execute("SELECT note FROM orders").fetchall(), "business rows")
        expect((1,), db.execute("SELECT count(*) FROM outbox").fetchone(), "commands")


def h59_in_the_drivers_default_mode():
    """The driver begins by itself; commit() succeeds in silence after the refusal."""
    db = fresh(isolation_level="")
    db.execute("INSERT INTO outbox(scope,token,kind,destination,payload) VALUES('s',42,'webhook','billing','{}')")
    db.commit()
    db.execute("INSERT INTO orders VALUES('before')")
    expect("FP001", say(db, INSERT, (41,)), "the stale one")
    db.commit()
    expect([], db.execute("SELECT note FROM orders").fetchall(), "business rows")


def h60_replace_and_h61_ignore():
    """The whole list is in bypass.py; here the drivers' own ways: executemany and RETURNING."""
    db = fresh()
    db.executemany(INSERT, [(42,), (42,)])
    try:
        db.executemany("INSERT OR REPLACE INTO outbox(n,id,scope,token,kind,destination,payload) VALUES(?,?,'s',42,'webhook','billing','x')", [(None, "new"), (1, "zz")])
        raise AssertionError("replaced a live command")
    except sqlite3.IntegrityError as error:
        expect("FP003", CODE.search(str(error)).group(), "executemany")
    try:
        db.executemany(INSERT.replace("INSERT", "INSERT OR IGNORE"), [(43,), (42,)])
        raise AssertionError("ignored a stale command")
    except sqlite3.IntegrityError as error:
        expect("FP001", CODE.search(str(error)).group(), "executemany")
    rows = db.execute("SELECT seq FROM outbox_status ORDER BY seq").fetchall()
    expect([(seq,) for seq in range(1, len(rows) + 1)], rows, "seq")
    if sqlite3.sqlite_version_info >= (3, 35):
        given = db.execute("INSERT INTO outbox(id,scope,token,kind,destination,payload) VALUES('r','s',43,'webhook','billing','x') RETURNING id").fetchone()
        expect(("r",), given, "RETURNING")
        again = db.execute("INSERT INTO outbox(id,scope,token,kind,destination,payload) VALUES('r','s',43,'webhook','billing','x') RETURNING id").fetchone()
        expect(None, again, "RETURNING of a repeat")


def h66_explicit_none_in_every_optional_column():
    db = fresh()
    columns = "n,id,holder,source,lane,key,headers,not_before_ms,expires_at_ms,traceparent,payload_bytes"
    sql = f"INSERT INTO outbox({columns},scope,token,kind,destination,payload) VALUES({','.join('?' * 16)})"
    expect("ok", say(db, sql, [None] * 11 + ["s", 1, "webhook", "billing", "{}"]), "all None")
    for missing in range(11, 16):
        values = [None] * 11 + ["s", 1, "webhook", "billing", "{}"]
        values[missing] = None
        expect("FP003", say(db, sql, values), f"column {missing} None")
    expect("refused", say(db, sql, [None] * 11 + ["s", 1, "webhook", "billing", b"{}"]), "bytes in payload")
    row = db.execute("SELECT length(id), lane, seq, key FROM outbox_status").fetchall()
    expect([(32, "", 1, None)], row, "what is stored")


if __name__ == "__main__":
    for name, case in list(globals().items()):
        if name.startswith("h") and callable(case):
            case()
            print("ok", name)
