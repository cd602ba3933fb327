//! A container runtime, as far as it reads the CNI's directory: as containerd does, which stops at the first file that is wrong.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use serde_json::Value;

/// Why there is no network.
#[derive(Debug)]
pub(crate) enum Wrong {
    /// A file went between being listed and being read. A runtime looks again, as it is told of the change.
    Moved,
    /// Something is wrong.
    Fault(String),
}

/// The plugins that a pod's network is made by: those of the first file.
pub(crate) fn network(directory: &Path) -> Result<Vec<String>, Wrong> {
    let fault = |text: String| Err(Wrong::Fault(text));
    let mut names: Vec<PathBuf> = fs::read_dir(directory)
        .map_err(|error| Wrong::Fault(error.to_string()))?
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let ending = path.extension().unwrap_or_default();
            ["conf", "conflist", "json"].iter().any(|one| ending == *one)
        })
        .collect();
    names.sort();
    let Some(first) = names.first() else {
        return fault("no network config found".to_owned());
    };
    let text = match fs::read_to_string(first) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Wrong::Moved),
        text => text.map_err(|error| Wrong::Fault(error.to_string()))?,
    };
    let Ok(value) = serde_json::from_str::<Value>(&text) else {
        return fault(format!("{}: {text:?}", first.display()));
    };
    if value["name"] != "net" {
        return fault(format!("{}: {value}", first.display()));
    }
    let plugins = match first.extension().is_some_and(|ending| ending == "conflist") {
        true => value["plugins"].as_array().cloned().unwrap_or_default(),
        false => vec![value],
    };
    let types: Vec<_> = plugins
        .iter()
        .map(|plugin| plugin["type"].as_str().unwrap_or("nothing").to_owned())
        .collect();
    match types.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["bridge"] | ["bridge", "redirector-cni"] => Ok(types),
        _ => fault(format!("{}: {types:?}", first.display())),
    }
}

/// Looks a thousand times a second whether there is a network.
pub(crate) struct Reader {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<usize, String>>>,
}

impl Reader {
    pub(crate) fn start(directory: &Path) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (directory, stopped) = (directory.to_owned(), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let (mut looks, mut moved) = (0, 0);
            while !stopped.load(Ordering::Relaxed) {
                match network(&directory) {
                    Ok(_) => (looks, moved) = (looks + 1, 0),
                    Err(Wrong::Moved) if moved < 100 => moved += 1,
                    Err(Wrong::Moved) => return Err(format!("files move at look {looks}")),
                    Err(Wrong::Fault(fault)) => return Err(format!("at look {looks}: {fault}")),
                }
                thread::sleep(Duration::from_millis(1));
            }
            Ok(looks)
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }

    /// Ends it, and tells how often it has looked.
    ///
    /// # Panics
    /// When there was once no network.
    pub(crate) fn end(mut self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("it ends once");
        thread.join().unwrap().unwrap_or_else(|fault| panic!("{fault}"))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
