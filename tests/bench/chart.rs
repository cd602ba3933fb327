//! Figures as bars, one SVG per subject: a group of bars per figure, a bar per mode, a whisker from the least to the most.

use anyhow::{Result, anyhow};
use plotters::{
    coord::{Shift, types::RangedCoordf64},
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::{
    results::{Compared, Figure, Results},
    stats::Summary,
    table::number,
};

/// A plot.
pub(crate) struct Plot<M> {
    pub(crate) file: &'static str,
    pub(crate) title: String,
    pub(crate) unit: &'static str,
    pub(crate) logarithmic: bool,
    pub(crate) groups: Vec<Group<M>>,
}

/// Bars side by side.
pub(crate) struct Group<M> {
    pub(crate) label: String,
    pub(crate) bars: Vec<(M, Summary)>,
}

impl<M: Compared> Group<M> {
    /// A figure's, or an empty one where it was not measured.
    pub(crate) fn found(
        results: &Results<M>,
        modes: &[M],
        (group, name): (&str, &str),
        label: String,
    ) -> Self {
        match results.find(group, name) {
            Some(figure) => Self::of(figure, modes, label),
            None => Self {
                label,
                bars: Vec::new(),
            },
        }
    }

    /// A figure's.
    pub(crate) fn of(figure: &Figure<M>, modes: &[M], label: String) -> Self {
        let bars = modes
            .iter()
            .filter_map(|mode| Some((*mode, figure.summary(*mode)?)))
            .collect();
        Self { label, bars }
    }
}

/// File names and contents of those that have bars.
pub(crate) fn draw_all<M: Compared>(plots: &[Plot<M>], modes: &[M]) -> Result<Vec<(String, String)>> {
    plots
        .iter()
        .filter(|plot| plot.groups.iter().any(|group| !group.bars.is_empty()))
        .map(|plot| Ok((plot.file.to_owned(), draw(plot, modes)?)))
        .collect()
}

const HEIGHT: u32 = 420;
/// Of the title and the legend.
const HEAD: u32 = 54;
/// Room below the bars for the labels' lines.
const LABELS: u32 = 76;
const LINE: i32 = 14;
/// Room for the numbers of the vertical axis.
const LEFT: u32 = 64;
/// Of a group.
const MIN_WIDTH: u32 = 110;

/// Where values lie on the vertical axis.
#[derive(Clone, Copy)]
struct Axis {
    logarithmic: bool,
    low: f64,
    high: f64,
}

impl Axis {
    fn of<M: Compared>(plot: &Plot<M>) -> Self {
        let all = || plot.groups.iter().flat_map(|group| &group.bars);
        let most = all()
            .map(|(_, summary)| summary.most)
            .fold(f64::MIN_POSITIVE, f64::max);
        let least = all()
            .map(|(_, summary)| summary.least)
            .filter(|value| *value > 0.0)
            .fold(most, f64::min);
        match plot.logarithmic {
            true => Self {
                logarithmic: true,
                low: least.log10().floor(),
                high: most.log10() + 0.1,
            },
            false => Self {
                logarithmic: false,
                low: 0.0,
                high: most * 1.08,
            },
        }
    }

    fn place(self, value: f64) -> f64 {
        match self.logarithmic {
            true => value.max(f64::MIN_POSITIVE).log10().max(self.low),
            false => value.max(self.low),
        }
    }

    fn label(self, place: f64) -> String {
        match self.logarithmic {
            true => number(10_f64.powf(place)),
            false => number(place),
        }
    }
}

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

fn draw<M: Compared>(plot: &Plot<M>, modes: &[M]) -> Result<String> {
    let mut text = String::new();
    let groups = u32::try_from(plot.groups.len())?;
    let size = ((groups * MIN_WIDTH + 90).max(640), HEIGHT);
    {
        let canvas = SVGBackend::with_string(&mut text, size).into_drawing_area();
        // The backend writes to a string, and only a bad size could fail.
        draw_on(plot, modes, &canvas).map_err(|error| anyhow!("drawing {}: {error}", plot.file))?;
    }
    Ok(text + "\n")
}

fn draw_on<M: Compared>(
    plot: &Plot<M>,
    modes: &[M],
    canvas: &Canvas<'_>,
) -> Result<(), Box<dyn std::error::Error>> {
    canvas.fill(&WHITE)?;
    let axis = Axis::of(plot);
    let (head, body) = canvas.split_vertically(HEAD);
    let title = ("sans-serif", 18)
        .into_text_style(&head)
        .pos(Pos::new(HPos::Left, VPos::Top));
    head.draw_text(
        &format!("{}, {}", plot.title, plot.unit),
        &title,
        (LEFT as i32 + 8, 10),
    )?;
    legend(&shown(plot, modes), &head)?;
    let mut chart = ChartBuilder::on(&body)
        .margin(8)
        .set_label_area_size(LabelAreaPosition::Left, LEFT)
        .set_label_area_size(LabelAreaPosition::Bottom, LABELS)
        .build_cartesian_2d(0.0..plot.groups.len() as f64, axis.low..axis.high)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(0)
        .y_labels(if axis.logarithmic { 5 } else { 8 })
        .y_label_formatter(&|place| axis.label(*place))
        .light_line_style(WHITE)
        .draw()?;
    bars(plot, modes, axis, &mut chart)?;
    for (number, group) in plot.groups.iter().enumerate() {
        let (x, y) = chart.backend_coord(&(number as f64 + 0.5, axis.low));
        for (line, text) in (0..).zip(group.label.lines()) {
            let style = ("sans-serif", 11)
                .into_text_style(canvas)
                .pos(Pos::new(HPos::Center, VPos::Top));
            canvas.draw_text(text, &style, (x, y + 6 + line * LINE))?;
        }
    }
    canvas.present()?;
    Ok(())
}

/// The modes that have bars.
fn shown<M: Compared>(plot: &Plot<M>, modes: &[M]) -> Vec<M> {
    let has_bars = |mode: &M| {
        let mut bars = plot.groups.iter().flat_map(|group| &group.bars);
        bars.any(|bar| bar.0 == *mode)
    };
    modes.iter().copied().filter(has_bars).collect()
}

/// Side by side above the bars.
fn legend<M: Compared>(modes: &[M], canvas: &Canvas<'_>) -> Result<(), Box<dyn std::error::Error>> {
    const WIDTH: i32 = 120;
    let style = ("sans-serif", 12)
        .into_text_style(canvas)
        .pos(Pos::new(HPos::Left, VPos::Center));
    for (place, mode) in (0..).zip(modes) {
        let (x, y) = (LEFT as i32 + 8 + place * WIDTH, 44);
        canvas.draw(&Rectangle::new(
            [(x, y - 5), (x + 12, y + 5)],
            colour(*mode).filled(),
        ))?;
        canvas.draw_text(mode.name(), &style, (x + 18, y))?;
    }
    Ok(())
}

fn colour(mode: impl Compared) -> RGBColor {
    let (red, green, blue) = mode.colour();
    RGBColor(red, green, blue)
}

fn bars<M: Compared>(
    plot: &Plot<M>,
    modes: &[M],
    axis: Axis,
    chart: &mut Chart<'_, '_>,
) -> Result<(), Box<dyn std::error::Error>> {
    let shown = shown(plot, modes);
    let width = 0.8 / shown.len().max(1) as f64;
    for (place, mode) in shown.iter().enumerate() {
        let of_mode = || {
            plot.groups.iter().enumerate().filter_map(move |(number, group)| {
                let (_, summary) = group.bars.iter().find(|bar| bar.0 == *mode)?;
                Some((number as f64 + 0.1 + place as f64 * width, summary))
            })
        };
        let rectangles = of_mode().map(|(left, summary)| {
            let corners = [
                (left, axis.low),
                (left + width * 0.92, axis.place(summary.median)),
            ];
            Rectangle::new(corners, colour(*mode).filled())
        });
        chart.draw_series(rectangles)?;
        chart.draw_series(of_mode().map(|(left, summary)| {
            let middle = left + width * 0.46;
            PathElement::new(
                [
                    (middle, axis.place(summary.least)),
                    (middle, axis.place(summary.most)),
                ],
                BLACK,
            )
        }))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::testing::Mode;

    fn plot(logarithmic: bool) -> Plot<Mode> {
        let bar = |mode, value: f64| (mode, Summary::of(&[value, value * 1.2]).unwrap());
        Plot {
            file: "x.svg",
            title: "Things & more".to_owned(),
            unit: "ms",
            logarithmic,
            groups: vec![
                Group {
                    label: "first\nline".to_owned(),
                    bars: vec![bar(Mode::Theirs, 60.0), bar(Mode::Ours, 0.4)],
                },
                Group {
                    label: "second".to_owned(),
                    bars: vec![bar(Mode::Ours, 0.0)],
                },
            ],
        }
    }

    #[test]
    fn a_plot_has_its_bars_labels_and_legend() {
        for logarithmic in [false, true] {
            let svg = draw(&plot(logarithmic), &[Mode::Direct, Mode::Theirs, Mode::Ours]).unwrap();
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
            for text in ["first", "line", "second", "theirs", "ours", "Things &amp; more"] {
                assert!(svg.contains(text), "{text} in {svg}");
            }
            assert!(!svg.contains("\ndirect\n") && !svg.contains("NaN"), "{svg}");
            let colour = svg.matches("#005AA0").count();
            assert_eq!(colour, 3, "two bars and an entry of the legend in {svg}");
        }
    }
}
