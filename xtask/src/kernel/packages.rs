//! Kernels out of Debian's archive: found by apt, downloaded, verified by its signatures, and unpacked below target/ without
//! being installed.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::{
    Kernel,
    version::{self, Package},
};
use crate::{
    archive::{Archive, Kinds},
    process::Step,
};

/// Kernels are split into packages with these names since 7.0; before, the image has everything.
const PARTS: [&str; 2] = ["linux-binary-", "linux-modules-"];

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
    let root = super::cache().join(format!("apt-{}", kernel.series));
    let archive = Archive::open(root, Kinds::Binary, kernel.suites, "kernels")?;
    let chosen = choose(&archive, kernel)?;
    let directory = super::cache().join(&chosen.name);
    // Written last: a directory without it is one that was not finished.
    let stamp = directory.join(".version");
    if fs::read_to_string(&stamp).ok().as_ref() != Some(&chosen.version) {
        let step = Step::start(format!("fetching {} {}", chosen.name, chosen.version));
        super::remove(&directory)?;
        fs::create_dir_all(&directory).with_context(|| format!("making {}", directory.display()))?;
        let mut packages = parts(&archive.ask(&["depends", "--important", &chosen.name]));
        packages.push(chosen.name.clone());
        archive.unpack(&packages, &directory)?;
        fs::write(&stamp, &chosen.version)?;
        step.done();
    }
    Ok(Unpacked {
        image: find_image(&directory)?,
        modules: find_modules(&directory)?,
        version: chosen.version,
    })
}

/// The package of a kernel.
fn choose(archive: &Archive, kernel: &Kernel) -> Result<Package> {
    let names = archive.ask(&["pkgnames", "linux-image-"]);
    let names: Vec<&str> = names
        .lines()
        .filter(|name| version::is_image(name, kernel.series))
        .collect();
    let candidates = if names.is_empty() {
        String::new()
    } else {
        archive.ask(&[&["madison"], names.as_slice()].concat())
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
