//! What a machine printed, read as it comes: a result per marker, what is missing at the end, and the lines to show.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
};

use super::plan::{Case, Plan};

/// Begins the lines that are for us; the rest of the console is output of tests and of the kernel.
pub(crate) const MARK: &str = "@@redirector";
/// Lines of the console that are shown when a machine ended early.
const LAST_LINES: usize = 40;

/// How a case ended.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Passed,
    /// The code that it ended with, or `not-run` when the suite did not know it.
    Failed(String),
}

/// One machine's results.
#[derive(Debug)]
pub(crate) struct Report {
    /// As it was asked for.
    label: String,
    plan: Plan,
    /// What `uname -r` said.
    release: Option<String>,
    results: BTreeMap<Case, Outcome>,
    problems: Vec<String>,
    done: bool,
    running: Option<Case>,
    last_lines: Vec<String>,
}

/// Numbers of a report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) missing: u64,
    pub(crate) not_applicable: u64,
}

impl Report {
    pub(crate) fn new(label: String, plan: Plan) -> Self {
        Self {
            label,
            plan,
            release: None,
            results: BTreeMap::new(),
            problems: Vec::new(),
            done: false,
            running: None,
            last_lines: Vec::new(),
        }
    }

    /// Reads one line of the console; what is to be shown of it is returned.
    pub(crate) fn read(&mut self, line: &str) -> Option<String> {
        let line = line.trim_end_matches('\r');
        // A test that ends without a line break has the marker behind its output.
        let Some((before, marked)) = line.split_once(MARK) else {
            self.remember(line);
            // The output of a test is of interest when it failed, and only then is there any.
            return (self.running.is_some() && !line.trim().is_empty()).then(|| line.to_owned());
        };
        self.remember(before);
        let words: Vec<&str> = marked.split_whitespace().collect();
        match words.as_slice() {
            ["kernel", release] => {
                self.release = Some((*release).to_owned());
                Some(format!("kernel {release}"))
            }
            ["begin", suite, name] => {
                self.running = Some(case(suite, name));
                None
            }
            ["end", suite, name, code, seconds] => {
                self.running = None;
                Some(self.end(&case(suite, name), code, seconds))
            }
            ["problem", problem @ ..] => {
                self.problems.push(problem.join(" "));
                Some(format!("PROBLEM  {}", problem.join(" ")))
            }
            ["done"] => {
                self.done = true;
                None
            }
            // Cut off, by the end of the machine or by the kernel's own words: what it was about is missing then.
            _ => None,
        }
    }

    fn end(&mut self, case: &Case, code: &str, seconds: &str) -> String {
        let outcome = if code == "0" {
            Outcome::Passed
        } else {
            Outcome::Failed(code.to_owned())
        };
        let line = match &outcome {
            Outcome::Passed => format!("ok       {case} ({seconds} s)"),
            Outcome::Failed(code) => format!("FAILED   {case} (code {code}, {seconds} s)"),
        };
        if self.plan.cases.contains(case) {
            self.results.insert(case.clone(), outcome);
        }
        line
    }

    fn remember(&mut self, line: &str) {
        if line.trim().is_empty() {
            return;
        }
        if self.last_lines.len() == LAST_LINES {
            self.last_lines.remove(0);
        }
        self.last_lines.push(line.to_owned());
    }

    fn missing(&self) -> impl Iterator<Item = &Case> {
        self.plan
            .cases
            .iter()
            .filter(|case| !self.results.contains_key(case))
    }

    fn failed(&self) -> impl Iterator<Item = (&Case, &str)> {
        self.results.iter().filter_map(|(case, outcome)| match outcome {
            Outcome::Failed(code) => Some((case, code.as_str())),
            Outcome::Passed => None,
        })
    }

    /// What counts: a problem or an early end is a failure, whatever the cases say.
    pub(crate) fn counts(&self) -> Counts {
        let failed = self.failed().count();
        let broken = self.problems.len() + usize::from(!self.done);
        Counts {
            passed: (self.results.len() - failed) as u64,
            failed: (failed + broken) as u64,
            missing: self.missing().count() as u64,
            not_applicable: self.plan.not_applicable.len() as u64,
        }
    }

    /// A row of the table of all kernels, in Markdown: kernel, then the cases of each suite that passed of those that ran.
    pub(crate) fn row(&self, suites: &[&str]) -> String {
        let release = self.release.as_deref().unwrap_or("did not start");
        let mut row = format!("| {} | {release} |", self.label);
        for suite in suites {
            let of =
                |cases: &mut dyn Iterator<Item = &Case>| cases.filter(|case| case.suite == *suite).count();
            let passed = self
                .results
                .iter()
                .filter(|(_, outcome)| **outcome == Outcome::Passed);
            let planned = of(&mut self.plan.cases.iter());
            let passed = of(&mut passed.map(|(case, _)| case));
            let lacking = of(&mut self.plan.not_applicable.iter().map(|(case, _)| case));
            let _ = match lacking {
                0 => write!(row, " {passed}/{planned} |"),
                _ => write!(row, " {passed}/{planned} ({lacking} not applicable) |"),
            };
        }
        row
    }
}

fn case(suite: &str, name: &str) -> Case {
    Case {
        suite: suite.to_owned(),
        name: name.to_owned(),
    }
}

/// Everything that is not simply right.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts {
            passed,
            failed,
            missing,
            not_applicable,
        } = self.counts();
        let release = self.release.as_deref().unwrap_or("did not start");
        let label = &self.label;
        writeln!(
            f,
            "kernel {label} ({release}): {passed} passed, {failed} failed, {missing} missing, {not_applicable} not applicable"
        )?;
        let mut reasons: BTreeMap<&str, Vec<&Case>> = BTreeMap::new();
        for (case, reason) in &self.plan.not_applicable {
            reasons.entry(reason).or_default().push(case);
        }
        for (reason, cases) in reasons {
            writeln!(f, "  not applicable, since {reason}:")?;
            cases.iter().try_for_each(|case| writeln!(f, "    {case}"))?;
        }
        for (case, code) in self.failed() {
            writeln!(f, "  FAILED   {case} (code {code})")?;
        }
        for problem in &self.problems {
            writeln!(f, "  PROBLEM  {problem}")?;
        }
        for case in self.missing() {
            writeln!(f, "  MISSING  {case}")?;
        }
        if !self.done {
            if let Some(case) = &self.running {
                writeln!(f, "  it ended while this ran: {case}")?;
            }
            writeln!(
                f,
                "  the machine did not come to its end; the last lines of its console:"
            )?;
            self.last_lines
                .iter()
                .try_for_each(|line| writeln!(f, "    {line}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(console: &str) -> Report {
        let plan = Plan {
            cases: vec![case("prog", "one"), case("e2e", "two")],
            not_applicable: vec![(case("e2e", "two_tcx"), "TCX links came with 6.6".into())],
        };
        let mut report = Report::new("5.10".into(), plan);
        for line in console.lines() {
            report.read(&line.replace("@@", MARK));
        }
        report
    }

    const WHOLE: &str = "@@ kernel 5.10.0-46-cloud-amd64\r\n\
                         @@ begin prog one\r\n\r\n@@ end prog one 0 3\r\n\
                         @@ begin e2e two\r\nit said@@ end e2e two 0 12\r\n@@ done\r\n";

    #[test]
    fn a_whole_run_is_read() {
        let report = report(WHOLE);
        let counts = Counts {
            passed: 2,
            not_applicable: 1,
            ..Counts::default()
        };
        assert_eq!(report.counts(), counts);
        assert_eq!(
            report.row(&["prog", "e2e"]),
            "| 5.10 | 5.10.0-46-cloud-amd64 | 1/1 | 1/1 (1 not applicable) |"
        );
        assert!(report.to_string().contains("e2e two_tcx"));
    }

    #[test]
    fn whatever_is_not_right_is_a_failure() {
        for (what, console, failed, missing) in [
            ("a failed case", WHOLE.replace("two 0 12", "two 101 12"), 1, 0),
            (
                "one that did not run",
                WHOLE.replace("two 0 12", "two not-run 0"),
                1,
                0,
            ),
            ("no end of the machine", WHOLE.replace("@@ done", ""), 1, 0),
            ("no marker", WHOLE.replace("@@ end e2e two 0 12", ""), 0, 1),
            ("half a marker", WHOLE.replace("two 0 12", "tw"), 0, 1),
            (
                "another's marker",
                WHOLE.replace("end e2e two 0", "end e2e three 0"),
                0,
                1,
            ),
            (
                "the kernel's complaint",
                WHOLE.replace("@@ done", "@@ problem BUG: oh\r\n@@ done"),
                1,
                0,
            ),
            ("nothing", String::new(), 1, 2),
        ] {
            let counts = report(&console).counts();
            assert_eq!((counts.failed, counts.missing), (failed, missing), "{what}");
        }
    }

    #[test]
    fn an_early_end_shows_where() {
        let console = WHOLE.replace(
            "it said@@ end e2e two 0 12\r\n@@ done",
            "Kernel panic - not syncing",
        );
        let text = report(&console).to_string();
        assert!(text.contains("it ended while this ran: e2e two"), "{text}");
        assert!(text.contains("Kernel panic"), "{text}");
        assert!(text.contains("MISSING  e2e two"), "{text}");
    }
}
