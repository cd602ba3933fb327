//! The image of the agent, built here by buildah from deploy/Containerfile, without a daemon and without base images: what the
//! Containerfile's build stage makes, [`lay_out`] makes, which is also what that stage calls.
//!
//! The programs are linked statically with the GNU C library, not with musl: its allocator is what the benchmarks measured, and it
//! takes no other toolchain. So the image needs no library, and the plugin runs on the node whatever library that has.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::{
    apt,
    build::{self, Profile},
    process::{self, Step},
    sbom, test,
    toolchain::Way,
};

/// What is in the image under /usr/local/bin.
const PROGRAMS: [&str; 2] = ["redirector", "redirector-cni"];
/// The C library's order of looking up names, without which it does not read /etc/hosts.
const NSSWITCH: &str = "hosts: files dns\n";
/// Where Debian has the roots of public authorities, which `SYSTEM` in the agent's settings means.
const ROOTS: &str = "etc/ssl/certs/ca-certificates.crt";
/// The cases of the suite `deploy` that start the agent from the image: as it should be, and with something missing.
const SMOKE: &str = "daemonset";

/// Builds the image, tries it, and leaves it as an archive.
pub(crate) fn run(way: Option<Way>) -> Result<()> {
    apt::require(apt::TESTS)?;
    let object = build::ebpf_object(way)?;
    let directory = process::root().join("target/image");
    let files = directory.join("files");
    lay_out_programs(&object, &files)?;
    let name = format!("redirector:{}", env!("CARGO_PKG_VERSION"));
    let archive = directory.join(format!("redirector-{}.tar", env!("CARGO_PKG_VERSION")));
    // Whatever happens from here on: what lies there was tried.
    remove(&archive)?;
    let buildah = Buildah::new(&directory)?;
    let step = Step::start(format!("image {name}"));
    let context = empty(&directory.join("context"))?;
    let mut build = buildah.command("build");
    build
        .args(["--isolation", "chroot", "--tag", &name])
        .arg(format!(
            "--build-context=build={}",
            directory.join("files").display()
        ))
        .args(["--file", "deploy/Containerfile"])
        .arg(context);
    process::run(&mut build)?;
    step.done();
    try_out(&buildah, &name, &object)?;
    let step = Step::start(archive.display().to_string());
    let sbom = archive.with_extension("cdx.json");
    sbom::write(&sbom)?;
    let partial = archive.with_extension("partial");
    remove(&partial)?;
    let target = format!("docker-archive:{}:{name}", partial.display());
    process::run(buildah.command("push").args(["--quiet", &name, &target]))?;
    fs::rename(&partial, &archive).with_context(|| format!("naming {}", archive.display()))?;
    step.done();
    let megabytes = |path: &Path| -> Result<f64> { Ok(fs::metadata(path)?.len() as f64 / 1e6) };
    for program in PROGRAMS {
        let path = files.join("image/usr/local/bin").join(program);
        println!("{program}: {:.1} MB", megabytes(&path)?);
    }
    println!("{}: {:.1} MB", archive.display(), megabytes(&archive)?);
    println!("{}: what is in it", sbom.display());
    Ok(())
}

/// Makes the image's files in `directory`.
pub(crate) fn lay_out(way: Option<Way>, directory: &Path) -> Result<()> {
    let object = build::ebpf_object(way)?;
    lay_out_programs(&object, directory)
}

/// Makes `directory/image` anew.
fn lay_out_programs(object: &Path, directory: &Path) -> Result<()> {
    apt::require(apt::IMAGE)?;
    let programs = build::static_programs(object)?;
    let image = empty(&directory.join("image"))?;
    for made in ["usr/local/bin", "etc/ssl/certs", "run", "var", "tmp"] {
        fs::create_dir_all(image.join(made))?;
    }
    for program in PROGRAMS {
        let from = programs.find(program)?;
        fs::copy(from, image.join("usr/local/bin").join(program))
            .with_context(|| format!("copying {}", from.display()))?;
    }
    // As everywhere, so that a path below one is a path below the other.
    symlink("/run", image.join("var/run"))?;
    fs::write(image.join("etc/nsswitch.conf"), NSSWITCH)?;
    let roots = Path::new("/").join(ROOTS);
    fs::copy(&roots, image.join(ROOTS)).with_context(|| format!("copying {}", roots.display()))?;
    Ok(())
}

/// An empty directory.
fn empty(path: &Path) -> Result<PathBuf> {
    if path.exists() {
        fs::remove_dir_all(path).with_context(|| format!("removing {}", path.display()))?;
    }
    fs::create_dir_all(path).with_context(|| format!("making {}", path.display()))?;
    Ok(path.to_owned())
}

/// Removes a file, which need not be there.
fn remove(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", file.display()))
        }
        _ => Ok(()),
    }
}

/// buildah, with all that it keeps in a directory of ours, which goes with it.
struct Buildah(PathBuf);

impl Drop for Buildah {
    fn drop(&mut self) {
        let _ = process::output(self.command("rm").arg("--all"));
        for kept in Self::KEPT {
            let kept = self.0.join(kept);
            if let Err(error) = fs::remove_dir_all(&kept)
                && error.kind() != io::ErrorKind::NotFound
            {
                eprintln!("removing {}: {error}", kept.display());
            }
        }
    }
}

impl Buildah {
    /// What it makes in its directory.
    const KEPT: [&str; 2] = ["storage", "runroot"];

    /// In `directory`, where an earlier run that was killed may have left its own.
    fn new(directory: &Path) -> Result<Self> {
        for kept in Self::KEPT {
            empty(&directory.join(kept))?;
        }
        Ok(Self(directory.to_owned()))
    }

    fn command(&self, subcommand: &str) -> Command {
        let mut command = process::command("buildah");
        // Without overlayfs and user namespaces, which are not everywhere.
        command.args(["--storage-driver", "vfs"]);
        command.arg("--root").arg(self.0.join("storage"));
        command.arg("--runroot").arg(self.0.join("runroot"));
        command.arg(subcommand);
        command
    }
}

/// A container of the image, of which only the files are wanted.
struct Files<'a> {
    buildah: &'a Buildah,
    container: String,
}

impl Drop for Files<'_> {
    fn drop(&mut self) {
        let _ = process::output(self.buildah.command("rm").arg(&self.container));
    }
}

/// Runs what is in the image, with nothing else there: each program by itself, then the agent as the DaemonSet would start it.
fn try_out(buildah: &Buildah, name: &str, object: &Path) -> Result<()> {
    let step = Step::start("the image's programs, in the image");
    let container = process::output(buildah.command("from").args(["--pull-never", name]));
    let files = Files {
        buildah,
        container: container
            .context("making a container of the image")?
            .trim()
            .to_owned(),
    };
    let root = process::output(buildah.command("mount").arg(&files.container));
    let root = PathBuf::from(root.context("mounting the image's files")?.trim());
    let chroot = process::find("chroot").context("there is no chroot")?;
    for (program, arguments, variable, expected) in [
        ("redirector", &["--version"][..], None, env!("CARGO_PKG_VERSION")),
        (
            "redirector-cni",
            &[],
            Some(("CNI_COMMAND", "VERSION")),
            "supportedVersions",
        ),
        (
            "redirector",
            &["agent", "--config", "/none"],
            None,
            "cannot read the configuration file /none",
        ),
    ] {
        let mut command = process::command(&chroot);
        command
            .arg(&root)
            .arg(format!("/usr/local/bin/{program}"))
            .args(arguments);
        command
            .env_clear()
            .envs(variable)
            .stdin(std::process::Stdio::null());
        let output = command
            .output()
            .with_context(|| format!("running {program} in the image"))?;
        let said = [output.stdout, output.stderr]
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .concat();
        ensure!(
            said.contains(expected),
            "{program} {arguments:?} in the image says {said:?}, without {expected:?}"
        );
    }
    step.done();
    let suites = build::suites(object, Profile::Release, &["deploy"])?;
    let mut command = process::command(suites.find("deploy")?);
    command
        .env("REDIRECTOR_IMAGE_ROOT", &root)
        .env("REDIRECTOR_BIN", root.join("usr/local/bin/redirector"))
        .env("REDIRECTOR_REQUIRE_ROOT", "1")
        .env("REDIRECTOR_PYTHON", test::python_peers()?)
        .current_dir(process::root().join("tests"))
        .arg(SMOKE);
    let step = Step::start("the agent from the image, as its DaemonSet says");
    process::run(&mut command)?;
    step.done();
    Ok(())
}
