//! The iptables programs: which ones there are, and running them in a pod's namespace, without a shell and with a deadline.

use std::{
    env, fmt, io,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    str::FromStr,
    time::Duration,
};

use serde::Serialize;
use tokio::{io::AsyncWriteExt, process::Command, time::timeout};

use super::rules::Family;
use crate::{redirect::Error, sys::netns::Netns};

/// Time that a program gets. They take some milliseconds, and longer where they load kernel modules or wait for the lock.
const DEADLINE: Duration = Duration::from_secs(15);

/// The share of it, in seconds, that the legacy programs wait for the lock (`/run/xtables.lock`), which others may hold.
const LOCK_WAIT: &str = "--wait=10";

/// Where programs for root are, should PATH lack it.
const MORE_PATH: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// Which of the programs are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Those that the node calls `iptables-restore` and so on.
    #[default]
    Auto,
    /// Those that write nftables.
    Nft,
    /// Those that write the tables of before.
    Legacy,
}

/// Why a text is not a [`Backend`].
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a backend of iptables: there are auto, nft and legacy")]
pub struct InvalidBackend(String);

impl FromStr for Backend {
    type Err = InvalidBackend;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "nft" => Ok(Self::Nft),
            "legacy" => Ok(Self::Legacy),
            _ => Err(InvalidBackend(text.to_owned())),
        }
    }
}

/// What the programs write to: nftables and the tables of before don't see each other's rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Variant {
    Nft,
    Legacy,
}

impl Variant {
    /// Both.
    pub(super) const ALL: [Self; 2] = [Self::Nft, Self::Legacy];
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nft => "nft",
            Self::Legacy => "legacy",
        })
    }
}

impl From<Variant> for Backend {
    fn from(variant: Variant) -> Self {
        match variant {
            Variant::Nft => Self::Nft,
            Variant::Legacy => Self::Legacy,
        }
    }
}

/// A set of programs.
#[derive(Debug, Clone)]
pub(super) struct Tools {
    v4: Pair,
    /// Without them: which one is missing.
    v6: Result<Pair, String>,
    /// What they write to.
    pub(super) variant: Variant,
    /// What they say of themselves.
    pub(super) version: String,
}

/// The two programs of a family.
#[derive(Debug, Clone)]
struct Pair {
    restore: PathBuf,
    save: PathBuf,
}

/// One run of a program.
#[derive(Debug)]
pub(super) struct Run<'a> {
    program: &'a Path,
    arguments: &'static [&'static str],
    input: &'a str,
}

impl Tools {
    /// Finds the programs of `backend`, and asks one for its version. Those for IPv6 need not be there.
    ///
    /// # Errors
    /// A program that is missing or does not say what it is: the error says which, where it was looked for and what brings it.
    pub(super) fn find(backend: Backend) -> Result<Self, Error> {
        Self::find_in(&directories(), backend)
    }

    fn find_in(directories: &[PathBuf], backend: Backend) -> Result<Self, Error> {
        let infix = match backend {
            Backend::Auto => "",
            Backend::Nft => "-nft",
            Backend::Legacy => "-legacy",
        };
        let pair = |family: &str| -> Result<Pair, Error> {
            Ok(Pair {
                restore: find_program(directories, &format!("{family}{infix}-restore"))?,
                save: find_program(directories, &format!("{family}{infix}-save"))?,
            })
        };
        let v4 = pair("iptables")?;
        let v6 = pair("ip6tables").map_err(|error| error.to_string());
        let here = Netns::current().map_err(|error| Error::new("opening the own namespace", error))?;
        let ask = Run {
            program: &v4.restore,
            arguments: &["--version"],
            input: "",
        };
        let version = run(&here, &[ask]).remove(0)?.trim().to_owned();
        // Before 1.8 there was but one kind, and it did not say which.
        let variant = match version.contains("nf_tables") {
            true => Variant::Nft,
            false => Variant::Legacy,
        };
        Ok(Self {
            v4,
            v6,
            variant,
            version,
        })
    }

    /// The programs of the families whose rules can be reached from this node.
    pub(super) fn families(&self) -> impl Iterator<Item = Programs<'_>> {
        let v6 = self.v6.as_ref().ok().filter(|_| kernel_has_v6());
        let all = [(Family::V4, Some(&self.v4)), (Family::V6, v6)];
        all.into_iter()
            .filter_map(|(family, pair)| Some(Programs { family, pair: pair? }))
    }

    /// Why there are no rules for IPv6, if there are none: the kernel or the node is without, which is no fault.
    pub(super) fn without_v6(&self) -> Option<String> {
        if !kernel_has_v6() {
            return Some("this kernel runs without IPv6".to_owned());
        }
        self.v6.as_ref().err().cloned()
    }
}

/// The programs of a family whose rules can be reached.
#[derive(Debug, Clone, Copy)]
pub(super) struct Programs<'a> {
    pub(super) family: Family,
    pair: &'a Pair,
}

impl<'a> Programs<'a> {
    /// The one that writes rules.
    pub(super) fn restore_path(self) -> &'a Path {
        &self.pair.restore
    }

    /// A run that prints the rules.
    pub(super) fn save(self) -> Run<'a> {
        Run {
            program: &self.pair.save,
            arguments: &[],
            input: "",
        }
    }

    /// A run that carries out `input` on the rules.
    pub(super) fn restore(self, input: &'a str) -> Run<'a> {
        Run {
            program: &self.pair.restore,
            arguments: &[LOCK_WAIT, "--noflush"],
            input,
        }
    }
}

/// Asked each time: the module may be loaded later.
fn kernel_has_v6() -> bool {
    Path::new("/proc/net/if_inet6").exists()
}

/// Where programs are looked for.
fn directories() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let in_path = env::split_paths(&path).filter(|path| path.is_absolute());
    in_path.chain(MORE_PATH.map(PathBuf::from)).collect()
}

fn find_program(directories: &[PathBuf], name: &str) -> Result<PathBuf, Error> {
    let found = directories
        .iter()
        .map(|directory| directory.join(name))
        .find(|path| path.is_file());
    found.ok_or_else(|| {
        let places: Vec<_> = directories.iter().map(|path| path.display().to_string()).collect();
        let reason = format!(
            "it is in none of {}: install the package iptables (in Debian 12 it brings the nft and the legacy programs), \
             or choose others by --iptables-backend",
            places.join(", ")
        );
        Error::new(format!("looking for {name}"), reason)
    })
}

/// Runs programs in a namespace, all at one time. What each printed, or why it failed, in their order. Blocking.
pub(super) fn run(netns: &Netns, runs: &[Run<'_>]) -> Vec<Result<String, Error>> {
    let all_failed = |operation: String, error: io::Error| -> Vec<_> {
        // An error cannot be cloned; its text can.
        let text = error.to_string();
        runs.iter()
            .map(|_| Err(Error::new(operation.clone(), text.clone())))
            .collect()
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return all_failed("preparing to run a program".to_owned(), error),
    };
    // A child is in the namespace of the thread that makes it, which is this one: the runtime has no other.
    let all = || runtime.block_on(futures_util::future::join_all(runs.iter().map(Run::run)));
    match netns.run(all) {
        Ok(results) => results,
        Err(error) => all_failed(format!("entering {}", netns.id()), error),
    }
}

impl Run<'_> {
    async fn run(&self) -> Result<String, Error> {
        let operation = format!("running {}", self.program.display());
        let failed = |error: io::Error| Error::new(operation.clone(), error);
        let mut child = Command::new(self.program)
            .args(self.arguments)
            .env("LC_ALL", "C")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        let mut stdin = child.stdin.take();
        let write = async {
            if let Some(mut stdin) = stdin.take() {
                // One that ends without reading all of it says why.
                let _ = stdin.write_all(self.input.as_bytes()).await;
            }
        };
        // Read to the end while it runs: a full pipe would hold it up.
        let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
        let outcome = timeout(DEADLINE, async {
            let ((), stdout, stderr) = tokio::join!(write, read_all(&mut stdout), read_all(&mut stderr));
            Ok(Output {
                status: child.wait().await?,
                stdout: stdout?,
                stderr: stderr?,
            })
        });
        let Output {
            status,
            stdout,
            stderr,
        } = match outcome.await {
            Ok(output) => output.map_err(failed)?,
            Err(_) => {
                // Waited for, so that it is gone when others are told that it failed.
                let _ = timeout(DEADLINE, child.kill()).await;
                return Err(Error::new(
                    operation,
                    format!("it has not ended in {DEADLINE:?}, and was killed"),
                ));
            }
        };
        if status.success() {
            return String::from_utf8(stdout).map_err(|error| Error::new(operation, error));
        }
        let said = String::from_utf8_lossy(&stderr);
        Err(Error::new(
            operation,
            format!("{status}: {}", explain(said.trim(), self.input)),
        ))
    }
}

async fn read_all(pipe: &mut Option<impl tokio::io::AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        tokio::io::AsyncReadExt::read_to_end(pipe, &mut bytes).await?;
    }
    Ok(bytes)
}

/// What a program said, with the line that it means and what can be done.
fn explain(said: &str, input: &str) -> String {
    let mut text = said.split_whitespace().collect::<Vec<_>>().join(" ");
    // `line 5 failed`; `Error occurred at line: 5`.
    let number = said.split("line").nth(1).and_then(|rest| {
        let rest = rest.trim_start_matches([' ', ':']);
        rest.split(|c: char| !c.is_ascii_digit())
            .next()?
            .parse::<usize>()
            .ok()
    });
    if let Some(line) = number.and_then(|number| input.lines().nth(number.checked_sub(1)?)) {
        text += &format!(" ({line})");
    }
    let lower = said.to_lowercase();
    let says = |signs: &[&str]| signs.iter().any(|sign| lower.contains(sign));
    if says(&[
        "table does not exist",
        "insmod",
        "failed to initialize nft",
        "protocol not supported",
        "no such file or directory",
        "no chain/target/match",
        "couldn't load match",
        "couldn't load target",
    ]) {
        text += "; the kernel or the programs lack a part: iptables mode needs the tables nat, mangle and raw, the matches mark \
                 and connmark and the targets REDIRECT, CONNMARK and CT (modules nf_tables and nft_compat, or ip_tables, \
                 iptable_nat, iptable_mangle and iptable_raw and their ip6 likes; xt_mark, xt_connmark, xt_REDIRECT, xt_CT); \
                 load them, or choose the other programs by --iptables-backend";
    } else if says(&["permission denied", "operation not permitted", "you must be root"]) {
        text += "; it needs CAP_NET_ADMIN, and the legacy programs CAP_NET_RAW";
    } else if says(&["xtables lock", "xtables.lock"]) {
        text += "; another program holds or hides /run/xtables.lock";
    }
    text
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    fn here(program: &str, arguments: &'static [&'static str], input: &str) -> Result<String, Error> {
        let ask = Run {
            program: Path::new(program),
            arguments,
            input,
        };
        run(&Netns::current().unwrap(), &[ask]).remove(0)
    }

    #[test]
    fn what_a_program_prints_is_returned() {
        // More than a pipe holds, each way.
        let long = "a line\n".repeat(100_000);
        assert_eq!(here("/bin/cat", &[], &long).unwrap(), long);
        // One that reads nothing.
        assert_eq!(here("/bin/echo", &["x"], &long).unwrap(), "x\n");
    }

    #[test]
    fn a_failure_says_what_ran_and_why() {
        let error = here("/bin/cat", &["/nonexistent/file"], "")
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("running /bin/cat: exit status: 1: /bin/cat: /nonexistent/file: No such file"),
            "{error}"
        );
        let error = here("/nonexistent/program", &[], "").unwrap_err().to_string();
        assert!(
            error.starts_with("running /nonexistent/program: No such file"),
            "{error}"
        );
    }

    #[test]
    fn a_missing_program_is_named_with_what_brings_it() {
        let error = find_program(&directories(), "iptables-of-nobody")
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("looking for iptables-of-nobody: it is in none of /"),
            "{error}"
        );
        assert!(
            error.contains("/usr/sbin") && error.contains("install the package iptables"),
            "{error}"
        );
    }

    #[test]
    fn the_programs_for_ipv6_need_not_be_there() {
        let directory = tempfile::tempdir().unwrap();
        let program = |name: &str| {
            let path = directory.path().join(name);
            fs::write(&path, "#!/bin/sh\necho 'x v1.8.9 (nf_tables)'\n").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        let find = || Tools::find_in(&[directory.path().to_owned()], Backend::Nft);
        assert!(find().unwrap_err().to_string().contains("iptables-nft-restore"));
        program("iptables-nft-restore");
        program("iptables-nft-save");
        let tools = find().unwrap();
        assert_eq!(tools.variant, Variant::Nft);
        let families = |tools: &Tools| {
            tools
                .families()
                .map(|programs| programs.family)
                .collect::<Vec<_>>()
        };
        assert_eq!(families(&tools), [Family::V4]);
        assert!(tools.without_v6().is_some());
        // One of two is as good as none.
        program("ip6tables-nft-restore");
        assert_eq!(families(&find().unwrap()), [Family::V4]);
        program("ip6tables-nft-save");
        let expected = if kernel_has_v6() { 2 } else { 1 };
        assert_eq!(families(&find().unwrap()).len(), expected);
        assert_eq!(find().unwrap().without_v6().is_none(), kernel_has_v6());
    }

    #[test]
    fn errors_name_the_line_and_the_remedy() {
        let input = "*nat\n:ISTIO_PRERT - [0:0]\n-A ISTIO_PRERT -j NOTHING\nCOMMIT\n";
        for (said, expected) in [
            (
                "iptables-restore: line 4 failed",
                "iptables-restore: line 4 failed (COMMIT)",
            ),
            (
                "iptables-restore v1.8.9 (nf_tables): \nline 3: RULE_APPEND failed (No such file or directory)",
                "(-A ISTIO_PRERT -j NOTHING); the kernel or the programs lack a part",
            ),
            (
                "iptables-restore v1.8.9 (legacy): Couldn't load target `NOTHING':No such file\n\nError occurred at line: 3",
                "(-A ISTIO_PRERT -j NOTHING); the kernel or the programs lack a part",
            ),
            (
                "Another app is currently holding the xtables lock.",
                "/run/xtables.lock",
            ),
            (
                "can't initialize iptables table `nat': Permission denied (you must be root)",
                "CAP_NET_ADMIN",
            ),
            ("line 99 failed", "line 99 failed"),
        ] {
            let text = explain(said, input);
            assert!(text.contains(expected), "{text}");
        }
    }
}
