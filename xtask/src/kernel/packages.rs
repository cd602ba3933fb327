//! Kernels out of Debian's archive: found by apt, downloaded, verified by its signatures, and unpacked below target/ without
//! being installed.
//!
//! apt works in a root of its own, so that suites which this machine does not have can be asked without a change to its
//! sources. The mirror is the one that the machine's own sources name.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use super::{
    Kernel,
    version::{self, Package},
};
use crate::process::{self, Step};

/// Lists that are younger are not fetched again.
const LISTS_LAST: Duration = Duration::from_secs(24 * 3600);
/// Kernels are split into packages with these names since 7.0; before, the image has everything.
const PARTS: [&str; 2] = ["linux-binary-", "linux-modules-"];
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A kernel that is there, unpacked.
#[derive(Debug)]
pub(crate) struct Unpacked {
    /// Version of its package.
    pub(crate) version: String,
    /// The image to boot.
    pub(crate) image: PathBuf,
    /// The directory with its modules.
    pub(crate) modules: PathBuf,
}

/// Finds a kernel in the archive and fetches it, unless it is there.
pub(crate) fn fetch(kernel: &Kernel) -> Result<Unpacked> {
    let apt = Apt::prepare(kernel)?;
    let chosen = apt.choose(kernel)?;
    let directory = super::cache().join(&chosen.name);
    // Written last: a directory without it is one that was not finished.
    let stamp = directory.join(".version");
    if fs::read_to_string(&stamp).ok().as_ref() != Some(&chosen.version) {
        let step = Step::start(format!("fetching {} {}", chosen.name, chosen.version));
        super::remove(&directory)?;
        fs::create_dir_all(&directory).with_context(|| format!("making {}", directory.display()))?;
        apt.unpack(&chosen.name, &directory)?;
        fs::write(&stamp, &chosen.version)?;
        step.done();
    }
    Ok(Unpacked {
        image: find_image(&directory)?,
        modules: find_modules(&directory)?,
        version: chosen.version,
    })
}

/// apt with a root of its own.
struct Apt {
    root: PathBuf,
}

impl Apt {
    fn prepare(kernel: &Kernel) -> Result<Self> {
        if process::find("apt-get").is_none() {
            bail!("kernels come from Debian's archive, and there is no apt-get here to ask it");
        }
        let apt = Self {
            root: super::cache().join(format!("apt-{}", kernel.series)),
        };
        for directory in ["state/lists/partial", "cache/archives/partial"] {
            let directory = apt.root.join(directory);
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
        let sources: String = kernel
            .suites
            .iter()
            .filter_map(|suite| Some((suite, mirrors.of(suite)?)))
            .map(|(suite, mirror)| format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n"))
            .collect();
        let list = apt.root.join("sources.list");
        let age = fs::metadata(apt.stamp())
            .and_then(|stamp| stamp.modified())
            .ok()
            .and_then(|time| time.elapsed().ok());
        let same = fs::read_to_string(&list).is_ok_and(|before| before == sources);
        if same && age.is_some_and(|age| age < LISTS_LAST) {
            return Ok(apt);
        }
        fs::write(&list, sources).with_context(|| format!("writing {}", list.display()))?;
        let step = Step::start(format!("asking for kernels of {}", kernel.suites.join(", ")));
        // A suite may be gone from the mirror; what the others and the last time gave may be enough, and is told if not.
        let update = ["update", "-qq", "--error-on=any"];
        match process::run(apt.command("apt-get").args(update)) {
            Err(error) if process::interrupted() => return Err(error),
            Err(_) => eprintln!("not every list could be had; going on with those that are there"),
            Ok(()) => fs::write(apt.stamp(), "")?,
        }
        step.done();
        Ok(apt)
    }

    fn stamp(&self) -> PathBuf {
        self.root.join(".updated")
    }

    fn command(&self, program: &str) -> Command {
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

    fn ask(&self, arguments: &[&str]) -> String {
        process::output(self.command("apt-cache").args(arguments)).unwrap_or_default()
    }

    fn choose(&self, kernel: &Kernel) -> Result<Package> {
        let names = self.ask(&["pkgnames", "linux-image-"]);
        let names: Vec<&str> = names
            .lines()
            .filter(|name| version::is_image(name, kernel.series))
            .collect();
        let candidates = if names.is_empty() {
            String::new()
        } else {
            self.ask(&[&["madison"], names.as_slice()].concat())
        };
        let candidates = candidates.lines().filter_map(Package::parse).collect();
        version::choose(candidates, kernel.oldest).with_context(|| {
            format!(
                "the archive has no linux-image-{}.*-cloud-amd64 in {}; is it reachable (`apt-get update` tells), and is \
                 that series still in one of these suites? They are listed in xtask/src/kernel/mod.rs",
                kernel.series,
                kernel.suites.join(", ")
            )
        })
    }

    /// Downloads the image with its parts into `directory`, and unpacks them there.
    fn unpack(&self, image: &str, directory: &Path) -> Result<()> {
        let needed = parts(&self.ask(&["depends", "--important", image]));
        process::run(
            self.command("apt-get")
                .args(["download", "-qq", image])
                .args(&needed)
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

/// The other packages that a kernel consists of, in the output of `apt-cache depends`.
fn parts(depends: &str) -> Vec<String> {
    depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .filter(|name| PARTS.iter().any(|part| name.starts_with(part)))
        .map(str::to_owned)
        .collect()
}

fn find_image(directory: &Path) -> Result<PathBuf> {
    let boot = ["boot", "usr/lib/modules"].map(|place| directory.join(place));
    super::files(&boot)
        .into_iter()
        .find(|path| super::file_name(path).starts_with("vmlinuz"))
        .with_context(|| format!("there is no kernel image below {}", directory.display()))
}

fn find_modules(directory: &Path) -> Result<PathBuf> {
    let places = ["usr/lib/modules", "lib/modules"].map(|place| directory.join(place));
    places
        .into_iter()
        .find(|place| place.is_dir())
        .with_context(|| format!("there are no modules below {}", directory.display()))
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

    #[test]
    fn a_kernel_in_parts_is_fetched_whole() {
        let depends = "linux-image-7.2.13+deb14-cloud-amd64\n  PreDepends: linux-base\n |Depends: dracut\n  \
                       Depends: linux-base-7.2.13+deb14-cloud-amd64\n  Depends: linux-binary-7.2.13+deb14-cloud-amd64\n  \
                       Depends: linux-modules-7.2.13+deb14-cloud-amd64\n";
        assert_eq!(
            parts(depends),
            [
                "linux-binary-7.2.13+deb14-cloud-amd64",
                "linux-modules-7.2.13+deb14-cloud-amd64"
            ]
        );
        assert!(parts("linux-image-5.10.0-46-cloud-amd64\n  Depends: kmod\n").is_empty());
    }
}
