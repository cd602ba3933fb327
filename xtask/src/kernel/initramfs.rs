//! The whole file system of the virtual machine: busybox, the programs that tests start, the agent, the suites, the modules,
//! and an init that runs the plan and powers off.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context, Result, bail};

use super::{file_name, modules, packages::Unpacked, plan::Plan, report};
use crate::process;

/// Programs of this machine that the suites start, taken along with their libraries.
const PROGRAMS: &[&str] = &["ip", "tc", "nsenter", "setpriv"];
/// Programs that are taken where this machine has them: for the ways to redirect that want them.
const OPTIONAL_PROGRAMS: &[&str] = &[
    "iptables-nft-restore",
    "iptables-nft-save",
    "ip6tables-nft-restore",
    "ip6tables-nft-save",
    "iptables-legacy-restore",
    "iptables-legacy-save",
    "ip6tables-legacy-restore",
    "ip6tables-legacy-save",
];
/// What these load when they run, for which there is no telling by ldd.
const PLUGINS: &[&str] = &["/usr/lib/x86_64-linux-gnu/xtables"];
/// Where the suites, the agent and the programs above are. Before busybox's in PATH, which has some of the same names.
const TOOLS: &str = "tools";
/// Longest time of one case, in seconds: several times what the slowest takes on an idle host.
const CASE_DEADLINE: u32 = 500;

/// What goes in, besides what every machine has.
pub(crate) struct Contents<'a> {
    pub(crate) kernel: &'a Unpacked,
    pub(crate) agent: &'a Path,
    /// By name.
    pub(crate) suites: Vec<(&'a str, &'a Path)>,
    pub(crate) plan: &'a Plan,
    /// Connections of the test with many of them.
    pub(crate) churn: u32,
}

/// Builds it in `directory`, and returns the archive.
pub(crate) fn build(contents: &Contents<'_>, directory: &Path) -> Result<PathBuf> {
    let root = directory.join("root");
    for name in [TOOLS, "bin", "modules", "proc", "sys", "dev", "run", "tmp", "etc"] {
        let path = root.join(name);
        fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
    }
    let busybox = process::find("busybox").context("there is no busybox")?;
    let mut programs = vec![(root.join("bin/busybox"), busybox)];
    for name in PROGRAMS {
        let path = process::find(name).with_context(|| format!("there is no {name}"))?;
        programs.push((root.join(TOOLS).join(name), path));
    }
    for name in OPTIONAL_PROGRAMS {
        programs.extend(process::find(name).map(|path| (root.join(TOOLS).join(name), path)));
    }
    let own = contents
        .suites
        .iter()
        .copied()
        .chain([("redirector", contents.agent)]);
    for (name, path) in own {
        let to = root.join(TOOLS).join(name);
        process::run(process::command("strip").arg("-o").arg(&to).arg(path))?;
        programs.push((to, path.to_owned()));
    }
    let mut libraries = BTreeSet::new();
    for (to, from) in &programs {
        if !to.exists() {
            copy(from, to)?;
        }
        libraries.extend(libraries_of(from));
    }
    let plugins: Vec<PathBuf> = PLUGINS.iter().map(PathBuf::from).collect();
    libraries.extend(super::files(&plugins));
    for library in &libraries {
        let relative = library
            .strip_prefix("/")
            .context("libraries have absolute paths")?;
        copy(library, &root.join(relative))?;
    }
    let order = modules::unpack(&contents.kernel.modules, &root.join("modules"))?;
    let init = root.join("init");
    fs::write(&init, script(&order, contents.plan, contents.churn))
        .with_context(|| format!("writing {}", init.display()))?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
    pack(&root, &directory.join("initramfs"))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)?;
    }
    // Copied through links: the name is what the loader looks for.
    fs::copy(from, to)
        .map(drop)
        .with_context(|| format!("copying {} to {}", from.display(), to.display()))
}

/// The files that the loader would map for a program; none for a static one.
fn libraries_of(program: &Path) -> Vec<PathBuf> {
    let output = process::output(process::command("ldd").arg(program));
    parse_ldd(&output.unwrap_or_default())
}

fn parse_ldd(output: &str) -> Vec<PathBuf> {
    output
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(PathBuf::from)
        .collect()
}

/// The init of the machine. Every result has a marker, which is all that [`report`] reads.
fn script(modules: &[String], plan: &Plan, churn: u32) -> String {
    let mark = report::MARK;
    let mut script = format!(
        r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/{TOOLS}:/bin HOME=/tmp TMPDIR=/tmp
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev 2>/dev/null
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp
# Before 5.11 the memory of maps and programs counts as locked.
ulimit -l unlimited
ulimit -n 20000
for module in {modules}; do
    insmod /modules/$module || echo "{mark} problem module $module was not inserted"
done
ip link set lo up
echo "{mark} kernel $(uname -r)"
echo "clock: $(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)"
export REDIRECTOR_BIN=/{TOOLS}/redirector REDIRECTOR_REQUIRE_ROOT=1 REDIRECTOR_CHURN={churn} RUST_BACKTRACE=0 NO_COLOR=1
seconds() {{ cut -d. -f1 /proc/uptime; }}
run() {{
    began=$(seconds)
    echo "{mark} begin $1 $2"
    timeout -k 5 {CASE_DEADLINE} /{TOOLS}/$1 --exact "$2" --test-threads 1 >/tmp/output 2>&1
    code=$?
    # One that does not know the name runs nothing, and calls that a success.
    if [ $code = 0 ] && ! grep -q '^test result: ok. 1 passed; 0 failed; 0 ignored' /tmp/output; then code=not-run; fi
    if [ $code != 0 ]; then tail -c 12000 /tmp/output; fi
    echo
    echo "{mark} end $1 $2 $code $(($(seconds) - began))"
}}
"#,
        modules = modules.join(" "),
    );
    for case in &plan.cases {
        writeln!(script, "run {} {}", case.suite, case.name).expect("a String takes all");
    }
    write!(
        script,
        r#"# That a processor got no time is the host's doing, and what hangs for it is told as such.
dmesg | grep -E 'BUG:|Oops|WARNING: |general protection' | grep -v 'soft lockup' | while read line; do
    echo "{mark} problem $line"
done
echo "{mark} done"
poweroff -f
"#
    )
    .expect("a String takes all");
    script
}

/// Makes the archive that the kernel unpacks, uncompressed: to unpack is slower in the machine than to read.
fn pack(root: &Path, archive: &Path) -> Result<PathBuf> {
    let files = super::entries(root)?;
    let list = archive.with_extension("list");
    let names: String = files
        .iter()
        .filter_map(|path| path.strip_prefix(root).ok())
        .map(|path| format!("{}\n", path.display()))
        .collect();
    fs::write(&list, names)?;
    let status = process::command("busybox")
        .args(["cpio", "-o", "-H", "newc"])
        .current_dir(root)
        .stdin(fs::File::open(&list)?)
        .stdout(fs::File::create(archive)?)
        .stderr(Stdio::null())
        .status()
        .context("starting busybox cpio")?;
    if !status.success() {
        bail!("busybox cpio could not write {}", file_name(archive));
    }
    Ok(archive.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::plan::Case;

    #[test]
    fn libraries_are_read_from_ldd() {
        let output = "\tlinux-vdso.so.1 (0x1)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x2)\n\t\
                      /lib64/ld-linux-x86-64.so.2 (0x3)\n\tlibx.so => not found\n";
        assert_eq!(
            parse_ldd(output),
            [
                Path::new("/lib/x86_64-linux-gnu/libc.so.6"),
                Path::new("/lib64/ld-linux-x86-64.so.2")
            ]
        );
        assert!(parse_ldd("\tstatically linked\n").is_empty());
    }

    #[test]
    fn every_case_is_in_the_script_once() {
        let case = Case {
            suite: "prog".into(),
            name: "a_case".into(),
        };
        let plan = Plan {
            cases: vec![case],
            ..Plan::default()
        };
        let script = script(&["llc.ko".into(), "stp.ko".into()], &plan, 10);
        assert_eq!(script.matches("\nrun prog a_case\n").count(), 1);
        assert!(script.contains("in llc.ko stp.ko;"));
        assert!(script.trim_end().ends_with("poweroff -f"));
    }
}
