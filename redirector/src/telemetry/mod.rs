//! What the agent tells about itself: logs and metrics, and how errors are put into words.

use std::{error::Error, fmt};

pub mod logs;
pub mod metrics;

/// An error with its causes, on one line.
pub struct Chain<'a>(pub &'a (dyn Error + 'a));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.0.to_string();
        let mut next = self.0.source();
        while let Some(cause) = next {
            let cause_text = cause.to_string();
            // Some errors, of other crates too, repeat their cause in their own text.
            if !text.ends_with(&cause_text) {
                text.push_str(": ");
                text.push_str(&cause_text);
            }
            next = cause.source();
        }
        for (index, line) in text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .enumerate()
        {
            let gap = if index == 0 { "" } else { " " };
            write!(f, "{gap}{line}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Quiet(#[source] std::io::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("outer: {0}")]
    struct Repeating(#[source] std::io::Error);

    #[test]
    fn causes_are_told_once_and_on_one_line() {
        let cause = || std::io::Error::other("inner\n  and more");
        for error in [&Quiet(cause()) as &dyn Error, &Repeating(cause())] {
            assert_eq!(Chain(error).to_string(), "outer: inner and more");
        }
    }
}
