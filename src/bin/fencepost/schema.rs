//! `fencepost schema`: the SQL contract for an application's own migrations, and the check that it is
//! still there.
//!
//! Migration tools take one statement at a time, and some lose triggers when they rebuild a table. What is
//! printed here is cut by SQLite itself, never by semicolons; `check` is for the application's CI.

use std::fmt::Write;

use clap::{Subcommand, ValueEnum};
use fencepost::sqlite::{
    CONTRACT, CONTRACT_MAJOR, CONTRACT_MINOR, Drift, Drifted, SchemaError, contract_statements, inspect, verify,
};
use serde_json::{Value, json};

use crate::exit::Exit;
use crate::output::Tone;
use crate::{Globals, database};

/// Options of `fencepost schema`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Print the contract as SQL, or as a migration for a framework
    Print {
        /// What is to run it
        #[arg(long = "for", value_name = "TOOL", value_enum, default_value = "plain")]
        tool: Tool,
    },
    /// Compare the database with the contract; exits with 1 where something is missing or changed
    Check,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Tool {
    /// The file itself, for `sqlite3 -bail` inside BEGIN … COMMIT
    Plain,
    /// A revision of Alembic
    Alembic,
    /// A migration of Django
    Django,
    /// A migration of Rails
    Rails,
}

/// Prints or checks; answers the exit code.
pub(crate) fn schema(args: &Args, globals: &Globals) -> anyhow::Result<u8> {
    match &args.verb {
        Verb::Print { tool } => print(*tool, globals).map(|()| 0),
        Verb::Check => check(globals),
    }
}

fn print(tool: Tool, globals: &Globals) -> anyhow::Result<()> {
    let text = match tool {
        Tool::Plain => CONTRACT.to_owned(),
        Tool::Alembic => alembic(&contract_statements()?),
        Tool::Django => django(&contract_statements()?),
        Tool::Rails => rails(&contract_statements()?),
    };
    Ok(globals.screen().print(text.trim_end())?)
}

/// Every printed migration begins with what must be known about it.
const NOTE: &str = "\
The outbox must be in the same database file as the business tables. Afterwards no process with an
SQLite older than 3.37 can read the file at all. Nothing in SQLite can stop a DROP TABLE: keep the
outbox out of everything that compares, rebuilds or drops tables. `fencepost schema check` tells
whether all of it is still there.";

fn version() -> String {
    format!("{CONTRACT_MAJOR}.{CONTRACT_MINOR}")
}

fn alembic(statements: &[String]) -> String {
    format!(
        r#""""The Fencepost outbox, SQL contract {version}.

{NOTE}

Autogenerate would propose to drop what no model describes. In env.py, pass this to every
context.configure:

    def include_object(object, name, type_, reflected, compare_to):
        table = name if type_ == "table" else getattr(getattr(object, "table", None), "name", "")
        return not (table or "").startswith("outbox")

    context.configure(..., include_object=include_object)

Never use batch_alter_table on a table of the outbox: the rebuilt table has no triggers.
"""
from alembic import op

revision = "fencepost_{name}"
down_revision = None  # the revision before this one
branch_labels = None
depends_on = None

{list}

def upgrade():
    # Not op.execute: it takes ":name" for a parameter. The savepoint makes it all or nothing, since
    # Python's driver begins no transaction before a CREATE.
    connection = op.get_bind()
    connection.exec_driver_sql("SAVEPOINT fencepost")
    try:
        for statement in STATEMENTS:
            connection.exec_driver_sql(statement)
    except BaseException:
        connection.exec_driver_sql("ROLLBACK TO fencepost")
        connection.exec_driver_sql("RELEASE fencepost")
        raise
    connection.exec_driver_sql("RELEASE fencepost")


def downgrade():
    raise NotImplementedError("the outbox may hold commands that nobody has sent yet")
"#,
        version = version(),
        name = version().replace('.', "_"),
        list = python_list(statements),
    )
}

fn django(statements: &[String]) -> String {
    format!(
        r#""""The Fencepost outbox, SQL contract {version}.

{NOTE}

Django manages only tables of its models, so it leaves the outbox alone as long as no model names
one of its tables. Its test databases are made by migrations, so they have the outbox too. If a model
is to read one of its views, give it managed = False.
"""
from django.db import migrations

{list}

class Migration(migrations.Migration):
    dependencies = []  # the last migration of the application
    # A list goes to the driver statement by statement as it is; one text would be cut at semicolons.
    operations = [migrations.RunSQL(STATEMENTS, elidable=False)]
"#,
        version = version(),
        list = python_list(statements),
    )
}

fn python_list(statements: &[String]) -> String {
    let mut list = "STATEMENTS = [\n".to_owned();
    for statement in statements {
        // Writing to a String can't fail.
        let _ = writeln!(list, "    {},", python_text(statement));
    }
    list.push_str("]\n");
    list
}

/// A raw text, to be read by people; where that can't hold it, one with escapes.
fn python_text(text: &str) -> String {
    let raw = !text.contains("\"\"\"") && !text.ends_with(['"', '\\']);
    // A text of JSON is one of Python too.
    if raw { format!("r\"\"\"{text}\"\"\"") } else { Value::from(text).to_string() }
}

fn rails(statements: &[String]) -> String {
    let note = NOTE.replace('\n', "\n# ");
    let mut text = format!(
        "# The Fencepost outbox, SQL contract {version}.\n#\n# {note}\n#\n\
         # schema.rb knows neither triggers nor STRICT: in config/application.rb set\n\
         #     config.active_record.schema_format = :sql\n\
         # so that db/structure.sql is kept, with everything in it, and databases are made from that.\n\
         class AddFencepostOutbox < ActiveRecord::Migration[7.0]\n  def up\n",
        version = version(),
    );
    for statement in statements {
        let _ = write!(text, "    execute <<'SQL'\n{statement}\nSQL\n");
    }
    text.push_str(
        "  end\n\n  def down\n    raise ActiveRecord::IrreversibleMigration, 'the outbox may hold commands that nobody has sent yet'\n  end\nend\n",
    );
    text
}

fn check(globals: &Globals) -> anyhow::Result<u8> {
    let (connection, path) = database::look(globals)?;
    let path = path.display().to_string();
    let found = match verify(&connection) {
        Ok(()) => Vec::new(),
        Err(SchemaError::Drift { objects }) => objects,
        Err(SchemaError::Older { found }) => return older(globals, &path, found),
        Err(error) => return Err(anyhow::Error::new(error).context(path)),
    };
    let version =
        inspect::contract_version(&connection)?.map_or_else(version, |(major, minor)| format!("{major}.{minor}"));
    let screen = globals.screen();
    if screen.is_json() {
        let objects: Vec<Value> =
            found.iter().map(|object| json!({ "name": object.name, "problem": problem(object) })).collect();
        screen
            .print_json(&json!({ "database": path, "version": version, "ok": found.is_empty(), "objects": objects }))?;
    } else if found.is_empty() {
        let good = screen.paint(Tone::Good, "in order");
        screen.print(&format!("{path}: outbox {version} is {good}"))?;
    } else {
        for object in &found {
            screen.print(&format!("{} {}", screen.paint(Tone::Bad, problem(object)), object.name))?;
        }
        screen.print(&format!("{path}: outbox {version} is not as the contract has it; nothing is sent from it"))?;
    }
    Ok(if found.is_empty() { 0 } else { Exit::Breach as u8 })
}

fn older(globals: &Globals, path: &str, found: i64) -> anyhow::Result<u8> {
    let screen = globals.screen();
    let version = format!("{CONTRACT_MAJOR}.{found}");
    if screen.is_json() {
        screen.print_json(&json!({ "database": path, "version": version, "ok": false, "objects": [] }))?;
    } else {
        screen.print(&format!("{path}: outbox {version} is older than {}; run fencepost init", self::version()))?;
    }
    Ok(Exit::Breach as u8)
}

const fn problem(object: &Drifted) -> &'static str {
    match object.how {
        Drift::Missing => "missing",
        Drift::Changed => "changed",
        Drift::Unknown => "not ours",
    }
}
