//! What the commands print: a table for people, or the same as JSON or YAML.

use std::{
    fmt::{self, Write as _},
    io::{self, IsTerminal, Write},
};

use anstream::{AutoStream, ColorChoice};
use anstyle::{AnsiColor, Style};
use serde_json::Value;

use crate::telemetry::Chain;

/// The form of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(super) enum Form {
    /// Columns, cut to the width of the terminal
    #[default]
    Table,
    /// More columns, never cut
    Wide,
    /// As the agent says it
    Json,
    /// The same as YAML
    Yaml,
}

/// `-o`.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(super) struct Output {
    /// Form of the output
    #[arg(
        short = 'o',
        long = "output",
        value_enum,
        default_value_t,
        value_name = "FORM"
    )]
    pub(super) form: Form,
}

/// Standard output cannot be written to.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output")]
pub(super) struct Unwritten(#[source] io::Error);

impl Unwritten {
    /// Whoever reads it has had enough: `redirector flows | head`.
    pub(super) fn is_closed(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Prints a text as it is.
pub(super) fn print(text: impl AsRef<[u8]>) -> Result<(), Unwritten> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_ref())
        .and_then(|()| out.flush())
        .map_err(Unwritten)
}

/// What standard output shows.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Screen {
    /// Characters of a line, where it is a terminal.
    pub(super) width: Option<usize>,
    /// Whether it shows colours.
    pub(super) colours: bool,
}

impl Screen {
    /// As it is: colours on a terminal alone, and neither with NO_COLOR nor on a dumb one.
    pub(super) fn of_stdout() -> Self {
        let out = io::stdout();
        let columns = terminal_size::terminal_size_of(&out).map(|(width, _)| width.0.into());
        Self {
            width: columns.filter(|width| *width > 0 && out.is_terminal()),
            colours: AutoStream::choice(&out) != ColorChoice::Never,
        }
    }
}

/// What a text means to its reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Tone {
    /// Nothing special.
    #[default]
    Plain,
    /// As it should be.
    Good,
    /// Look at it.
    Warning,
    /// Mend it.
    Bad,
    /// Beside the point.
    Faint,
}

impl Tone {
    fn style(self) -> Style {
        let colour = |colour: AnsiColor| Style::new().fg_color(Some(colour.into()));
        match self {
            Self::Plain => Style::new(),
            Self::Good => colour(AnsiColor::Green),
            Self::Warning => colour(AnsiColor::Yellow),
            Self::Bad => colour(AnsiColor::Red).bold(),
            Self::Faint => Style::new().dimmed(),
        }
    }

    /// The text in it, where colours are shown.
    pub(super) fn paint(self, text: &str, screen: Screen) -> String {
        let style = self.style();
        match screen.colours {
            true => format!("{style}{text}{style:#}"),
            false => text.to_owned(),
        }
    }
}

/// What others have named, without what would move the cursor or break the line.
pub(super) fn harmless(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// A field of a table.
#[derive(Debug, Clone, Default)]
pub(super) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    /// In a tone.
    pub(super) fn toned(text: impl fmt::Display, tone: Tone) -> Self {
        let text = harmless(&text.to_string());
        match text.is_empty() {
            true => Self {
                text: "-".to_owned(),
                tone: Tone::Faint,
            },
            false => Self { text, tone },
        }
    }
}

impl<T: fmt::Display> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::toned(text, Tone::Plain)
    }
}

/// Rows under heads. What belongs to a row and is too long for a column is on lines of its own below it.
#[derive(Debug, Default)]
pub(super) struct Table {
    heads: Vec<&'static str>,
    rows: Vec<(Vec<Cell>, Vec<Cell>)>,
    /// Never cut.
    is_wide: bool,
}

/// Between columns.
const GAP: usize = 2;

/// No column is cut to less.
const NARROWEST: usize = 8;

impl Table {
    pub(super) fn new(heads: &[&'static str], form: Form) -> Self {
        Self {
            heads: heads.to_vec(),
            rows: Vec::new(),
            is_wide: form == Form::Wide,
        }
    }

    /// Adds a row, with a field for each head.
    pub(super) fn row(&mut self, cells: Vec<Cell>, notes: Vec<Cell>) {
        debug_assert_eq!(cells.len(), self.heads.len());
        self.rows.push((cells, notes));
    }

    pub(super) fn render(&self, screen: Screen) -> String {
        let widths = self.widths(screen.width.filter(|_| !self.is_wide));
        let mut out = String::new();
        let heads = self.heads.iter().map(|head| Cell::toned(head, Tone::Faint));
        line(&mut out, &heads.collect::<Vec<_>>(), &widths, screen);
        for (cells, notes) in &self.rows {
            line(&mut out, cells, &widths, screen);
            for note in notes {
                let _ = writeln!(out, "    {}", note.tone.paint(&note.text, screen));
            }
        }
        out
    }

    /// Those of the columns: what their fields need, and less of the widest ones where a line has not so many characters.
    fn widths(&self, most: Option<usize>) -> Vec<usize> {
        let mut widths: Vec<usize> = self.heads.iter().map(|head| head.len()).collect();
        for (cells, _) in &self.rows {
            for (width, cell) in widths.iter_mut().zip(cells) {
                *width = (*width).max(cell.text.chars().count());
            }
        }
        let Some(most) = most else {
            return widths;
        };
        while widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1) > most {
            match widths.iter_mut().max() {
                Some(widest) if *widest > NARROWEST => *widest -= 1,
                _ => break,
            }
        }
        widths
    }
}

fn line(out: &mut String, cells: &[Cell], widths: &[usize], screen: Screen) {
    let mut pending = 0;
    for (cell, width) in cells.iter().zip(widths) {
        let length = cell.text.chars().count();
        let (text, shown) = match length > *width {
            true => {
                let kept = cell.text.chars().take(width - 1);
                (kept.chain(['…']).collect(), *width)
            }
            false => (cell.text.clone(), length),
        };
        // Nothing is after the last one.
        let _ = write!(out, "{:pending$}{}", "", cell.tone.paint(&text, screen));
        pending = width - shown + GAP;
    }
    out.push('\n');
}

/// A value as text in one of the forms that are for programs.
pub(super) fn structured(value: &Value, form: Form) -> anyhow::Result<String> {
    if form == Form::Yaml {
        return serde_yaml::to_string(value).map_err(|error| anyhow::anyhow!("{}", Chain(&error)));
    }
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(form: Form) -> Table {
        let mut table = Table::new(&["NAME", "STATE", "UID"], form);
        table.row(
            vec![
                "web".into(),
                Cell::toned("captured", Tone::Good),
                "0123456789abcdef".into(),
            ],
            Vec::new(),
        );
        table.row(
            vec!["a\x1b[2Jb\n".into(), Cell::toned("bad", Tone::Bad), "".into()],
            vec!["a long word on why it is so, which no width cuts".into()],
        );
        table
    }

    #[test]
    fn columns_are_as_wide_as_they_must_be() {
        let text = table(Form::Table).render(Screen::default());
        assert_eq!(
            text,
            "NAME     STATE     UID\n\
             web      captured  0123456789abcdef\n\
             a\u{fffd}[2Jb\u{fffd}  bad       -\n    a long word on why it is so, which no width cuts\n"
        );
    }

    #[test]
    fn a_terminal_gets_colours_and_no_line_that_is_longer_than_it_is() {
        let screen = Screen {
            width: Some(30),
            colours: false,
        };
        let text = table(Form::Table).render(screen);
        assert!(text.contains("web      captured  0123456789…\n"), "{text}");
        let text = table(Form::Wide).render(screen);
        assert!(text.contains("0123456789abcdef\n"), "{text}");
        let narrow = Screen {
            width: Some(3),
            colours: true,
        };
        let text = table(Form::Table).render(narrow);
        assert!(
            text.contains("\u{1b}[32mcaptured\u{1b}[0m  0123456…\n"),
            "{text:?}"
        );
        assert!(!text.contains("\u{1b}[2J"), "{text:?}");
    }
}
