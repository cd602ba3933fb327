//! The files that a benchmark writes, and what all of them say of their run.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context, Result};
use redirector_tests::node::Family;
use serde_json::{Value, json};

use crate::{
    machine::Machine,
    table::{Target, target_json, targets_table},
};

/// Where the results are that are published.
pub(crate) const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/benchmarks");

/// On what, when and how long was measured.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) machine: Machine,
    pub(crate) load_after: String,
    pub(crate) duration: Duration,
    pub(crate) rounds: u32,
    pub(crate) family: Family,
    /// With amounts too small to mean anything.
    pub(crate) tiny: bool,
}

impl Run {
    /// For a file: this, and what the benchmark adds.
    pub(crate) fn to_json(&self, targets: &[Target], more: Value) -> Result<String> {
        let mut machine = self.machine.to_json();
        machine["load_after"] = json!(self.load_after);
        let mut value = json!({
            "machine": machine,
            "seconds": self.duration.as_secs(),
            "rounds": self.rounds,
            "tiny": self.tiny,
            "family": self.family.name(),
            "measures_to_reach": targets.iter().map(target_json).collect::<Vec<Value>>(),
        });
        if let (Value::Object(all), Value::Object(more)) = (&mut value, more) {
            all.extend(more);
        }
        Ok(serde_json::to_string_pretty(&value)? + "\n")
    }

    /// The head of a page.
    pub(crate) fn head(&self, title: &str, name: &str) -> String {
        let warning = if self.tiny {
            "**A trial with tiny amounts: the figures mean nothing.**\n\n"
        } else {
            ""
        };
        let machine = &self.machine;
        format!(
            "# {title}\n\nWritten by `cargo xtask bench {name}`; every value is in [{name}.json]({name}.json), what is measured \
             and how in [README.md](README.md).\n\n{warning}Linux {}, {}, {} processors, {} MiB; load {} before and {} after; {} \
             rounds in {} min {} s, {}.\n",
            machine.kernel,
            machine.cpu,
            machine.cpus,
            machine.memory_mib,
            machine.load,
            self.load_after,
            self.rounds,
            self.duration.as_secs() / 60,
            self.duration.as_secs() % 60,
            match self.family {
                Family::V4 => "IPv4",
                Family::V6 => "IPv6",
            },
        )
    }
}

/// A section with the plots of these file names, which begin with the benchmark's.
pub(crate) fn plots_section(plots: &[&str], name: &str) -> String {
    if plots.is_empty() {
        return String::new();
    }
    let images = plots.iter().map(|plot| {
        let subject = plot
            .trim_end_matches(".svg")
            .trim_start_matches(name)
            .replace('-', " ");
        format!("![{}]({plot})\n\n", subject.trim())
    });
    let images: String = images.collect();
    format!("\n## Plots\n\nBars are medians, whiskers go from the least to the most.\n\n{images}")
}

/// Told before many minutes are spent.
pub(crate) fn check(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("making {} (--out)", directory.display()))
}

/// Writes the values, the plots and the page of the benchmark `name`, and prints the measures to reach.
pub(crate) fn write(
    directory: &Path,
    name: &str,
    json: &str,
    plots: &[(String, String)],
    page: &str,
    targets: &[Target],
) -> Result<()> {
    let put = |name: &str, text: &str| {
        let path = directory.join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        println!("wrote {}", path.display());
        anyhow::Ok(())
    };
    put(&format!("{name}.json"), json)?;
    for (plot, svg) in plots {
        put(plot, svg)?;
    }
    // One empty line at a time.
    let mut page = page.to_owned();
    while page.contains("\n\n\n") {
        page = page.replace("\n\n\n", "\n\n");
    }
    put(&format!("{name}.md"), &(page.trim_end().to_owned() + "\n"))?;
    println!("\n{}", targets_table(targets));
    Ok(())
}
