//! Debian's archive, asked by apt in a root of its own, so that suites and sources which this machine does not have can be had without a
//! change to its settings. The mirror is the one that the machine's own sources name; apt verifies what comes by the archive's
//! signatures. Nothing is installed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::process::{self, Step};

/// Lists that are younger are not fetched again.
const LISTS_LAST: Duration = Duration::from_secs(24 * 3600);
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// What of the archive is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kinds {
    /// Packages.
    Binary,
    /// Packages, and their sources.
    WithSources,
}

/// apt with a root of its own.
pub(crate) struct Archive {
    root: PathBuf,
}

impl Archive {
    /// Suites of the archive, with lists that are not old; `what` is to be found there.
    pub(crate) fn open(root: PathBuf, kinds: Kinds, suites: &[&str], what: &str) -> Result<Self> {
        if process::find("apt-get").is_none() {
            bail!("{what} come from Debian's archive, and there is no apt-get here to ask it");
        }
        let archive = Self { root };
        for directory in ["state/lists/partial", "cache/archives/partial"] {
            let directory = archive.root.join(directory);
            fs::create_dir_all(&directory).with_context(|| format!("making {}", directory.display()))?;
        }
        let targets = process::output(process::command("apt-get").args([
            "indextargets",
            // Also those whose lists were never fetched here, or were removed.
            "--no-release-info",
            "--format",
            "$(RELEASE) $(REPO_URI)",
            "Created-By: Packages",
        ]));
        let mirrors = Mirrors::read(&targets.unwrap_or_default())?;
        let types = match kinds {
            Kinds::Binary => &["deb"][..],
            Kinds::WithSources => &["deb", "deb-src"],
        };
        let sources: String = suites
            .iter()
            .filter_map(|suite| Some((suite, mirrors.of(suite)?)))
            .flat_map(|(suite, mirror)| {
                types
                    .iter()
                    .map(move |kind| format!("{kind} [signed-by={KEYRING}] {mirror} {suite} main\n"))
            })
            .collect();
        let list = archive.root.join("sources.list");
        let age = fs::metadata(archive.stamp())
            .and_then(|stamp| stamp.modified())
            .ok()
            .and_then(|time| time.elapsed().ok());
        let same = fs::read_to_string(&list).is_ok_and(|before| before == sources);
        if same && age.is_some_and(|age| age < LISTS_LAST) {
            return Ok(archive);
        }
        fs::write(&list, sources).with_context(|| format!("writing {}", list.display()))?;
        let step = Step::start(format!("asking for {what} of {}", suites.join(", ")));
        // A suite may be gone from the mirror; what the others and the last time gave may be enough, and is told if not.
        let update = ["update", "-qq", "--error-on=any"];
        match process::run(archive.command("apt-get").args(update)) {
            Err(error) if process::interrupted() => return Err(error),
            Err(_) => eprintln!("not every list could be had; going on with those that are there"),
            Ok(()) => fs::write(archive.stamp(), "")?,
        }
        step.done();
        Ok(archive)
    }

    fn stamp(&self) -> PathBuf {
        self.root.join(".updated")
    }

    /// A program of apt.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = process::command(program);
        let option = |name: &str, path: &str| format!("{name}={}", self.root.join(path).display());
        for option in [
            option("Dir::Etc::sourcelist", "sources.list"),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            option("Dir::State", "state"),
            option("Dir::Cache", "cache"),
            "APT::Architecture=amd64".to_owned(),
            // Only packages: no translations, no descriptions of applications.
            "Acquire::Languages=none".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
            // An old suite is no longer signed anew; its signature still has to be right.
            "Acquire::Check-Valid-Until=false".to_owned(),
            // Downloads go below target/, which the user that apt would change to can't enter.
            "APT::Sandbox::User=root".to_owned(),
        ] {
            command.args(["-o", &option]);
        }
        command
    }

    /// What `apt-cache` prints; nothing when it fails.
    pub(crate) fn ask(&self, arguments: &[&str]) -> String {
        process::output(self.command("apt-cache").args(arguments)).unwrap_or_default()
    }

    /// Downloads packages into `directory`, and unpacks them there.
    pub(crate) fn unpack(&self, packages: &[impl AsRef<str>], directory: &Path) -> Result<()> {
        process::run(
            self.command("apt-get")
                .args(["download", "-qq"])
                .args(packages.iter().map(AsRef::as_ref))
                .current_dir(directory),
        )?;
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "deb") {
                process::run(process::command("dpkg-deb").arg("-x").arg(&path).arg(directory))?;
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}

/// The mirrors of this machine: of releases, and of their security updates.
#[derive(Debug, Default, PartialEq, Eq)]
struct Mirrors {
    releases: Option<String>,
    security: Option<String>,
}

impl Mirrors {
    /// Lines of a suite and where it comes from. Suites of Debian have one word, or `-updates` and the like behind it.
    fn read(text: &str) -> Result<Self> {
        let mut mirrors = Self::default();
        for (suite, uri) in text.lines().filter_map(|line| line.split_once(' ')) {
            let mirror = if suite.ends_with("-security") {
                &mut mirrors.security
            } else if uri.trim_end_matches('/').ends_with("/debian") {
                &mut mirrors.releases
            } else {
                continue;
            };
            mirror.get_or_insert_with(|| uri.to_owned());
        }
        if mirrors.releases.is_none() {
            bail!(
                "apt's sources on this machine name no mirror of Debian (a URI that ends with /debian), from which the kernels \
                 would come; `apt-get indextargets` shows what they name"
            );
        }
        Ok(mirrors)
    }

    fn of(&self, suite: &str) -> Option<&str> {
        if suite.ends_with("-security") {
            self.security.as_deref()
        } else {
            self.releases.as_deref()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_are_read_from_the_machines_own_sources() {
        let mirrors = Mirrors::read(
            "stable http://elsewhere.example/tools/\n\
             bookworm http://mirror.example/debian/\n\
             bookworm-updates http://other.example/debian/\n\
             bookworm-security http://mirror.example/debian-security/\n",
        )
        .unwrap();
        assert_eq!(mirrors.of("sid"), Some("http://mirror.example/debian/"));
        assert_eq!(
            mirrors.of("trixie-security"),
            Some("http://mirror.example/debian-security/")
        );
        let without = Mirrors::read("bookworm http://mirror.example/debian\n").unwrap();
        assert_eq!(without.of("trixie-security"), None);
        assert!(Mirrors::read("stable http://elsewhere.example/tools/\n").is_err());
    }
}
