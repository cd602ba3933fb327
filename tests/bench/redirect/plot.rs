//! The figures as bars, one SVG per subject: a group of bars per figure, a bar per mode, a whisker from the least to the most.

use anyhow::{Result, anyhow};
use plotters::{
    coord::{Shift, types::RangedCoordf64},
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{
    cost::Load,
    enrol, growth,
    modes::Mode,
    report::{Report, number},
    results::Figure,
    traffic::{self, BULK, CONNECTIONS, P50, P99, Scenario},
};
use crate::stats::Summary;

/// A plot.
struct Plot {
    file: &'static str,
    title: String,
    unit: &'static str,
    logarithmic: bool,
    groups: Vec<Group>,
}

/// Bars side by side.
struct Group {
    label: String,
    bars: Vec<(Mode, Summary)>,
}

/// File names and contents.
pub(crate) fn all(report: &Report) -> Result<Vec<(String, String)>> {
    let mut plots = traffic_plots(report);
    plots.push(enrolment(report));
    plots.push(programs(report));
    plots.push(growing(report));
    plots
        .iter()
        .filter(|plot| plot.groups.iter().any(|group| !group.bars.is_empty()))
        .map(|plot| Ok((plot.file.to_owned(), draw(plot, &report.modes)?)))
        .collect()
}

fn traffic_plots(report: &Report) -> Vec<Plot> {
    let scenarios = |names: &[&str]| -> Vec<Group> {
        Scenario::ALL
            .iter()
            .flat_map(|scenario| names.iter().map(move |name| (scenario.name(), *name)))
            .map(|(scenario, name)| {
                let label = match names.len() {
                    1 => scenario.to_owned(),
                    _ => format!("{scenario}\n{name}"),
                };
                group(report, scenario, name, label)
            })
            .collect()
    };
    let plot = |file, title: &str, unit, groups| Plot {
        file,
        title: title.to_owned(),
        unit,
        logarithmic: false,
        groups,
    };
    let bulk = BULK.map(|(name, _, _)| name);
    let cpu = [
        traffic::cpu_per_gibibyte("total"),
        traffic::cpu_per_connections("total"),
    ];
    vec![
        plot(
            "redirect-connections.svg",
            "New connections per second",
            "1/s",
            scenarios(&[CONNECTIONS]),
        ),
        plot(
            "redirect-latency.svg",
            "Request and answer on an open connection",
            "us",
            scenarios(&[P50, P99]),
        ),
        plot(
            "redirect-throughput.svg",
            "Throughput",
            "Gbit/s",
            scenarios(&bulk),
        ),
        plot(
            "redirect-cpu.svg",
            "Processor time of the whole machine, load included",
            "s",
            scenarios(&cpu.each_ref().map(String::as_str)),
        ),
    ]
}

fn enrolment(report: &Report) -> Plot {
    let at_once = enrol::at_once(report.sizes.at_once);
    let groups = [enrol::ONE_AT_A_TIME, at_once.as_str()]
        .iter()
        .flat_map(|name| report.results.group(name).map(move |figure| (name, figure)))
        .map(|(name, figure)| {
            of(
                report,
                figure,
                format!("{name}\n{}", figure.name.replace(", ", "\n")),
            )
        })
        .collect();
    Plot {
        file: "redirect-enrolment.svg",
        title: "Enrolling and removing pods".to_owned(),
        unit: "ms",
        logarithmic: true,
        groups,
    }
}

fn programs(report: &Report) -> Plot {
    let groups = Load::ALL
        .iter()
        .flat_map(|load| {
            report
                .results
                .group(load.group())
                .map(move |figure| (load, figure))
        })
        .map(|(load, figure)| of(report, figure, format!("{}\n{}", load.name(), figure.name)))
        .collect();
    Plot {
        file: "redirect-programs.svg",
        title: "A run of an eBPF program, with what counting costs (see the empty one)".to_owned(),
        unit: "ns",
        logarithmic: false,
        groups,
    }
}

fn growing(report: &Report) -> Plot {
    let groups = report.sizes.growth.iter().map(|pods| {
        let name = growth::group(*pods);
        group(report, &name, CONNECTIONS, name.clone())
    });
    Plot {
        file: "redirect-growth.svg",
        title: "New connections per second of one pod while others are enrolled".to_owned(),
        unit: "1/s",
        logarithmic: false,
        groups: groups.collect(),
    }
}

fn group(report: &Report, group: &str, name: &str, label: String) -> Group {
    match report.results.find(group, name) {
        Some(figure) => of(report, figure, label),
        None => Group {
            label,
            bars: Vec::new(),
        },
    }
}

fn of(report: &Report, figure: &Figure, label: String) -> Group {
    let bars = report
        .modes
        .iter()
        .filter_map(|mode| Some((*mode, figure.summary(*mode)?)))
        .collect();
    Group { label, bars }
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
    fn of(plot: &Plot) -> Self {
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

fn draw(plot: &Plot, modes: &[Mode]) -> Result<String> {
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

fn draw_on(plot: &Plot, modes: &[Mode], canvas: &Canvas<'_>) -> Result<(), Box<dyn std::error::Error>> {
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
fn shown(plot: &Plot, modes: &[Mode]) -> Vec<Mode> {
    let has_bars = |mode: &Mode| {
        let mut bars = plot.groups.iter().flat_map(|group| &group.bars);
        bars.any(|bar| bar.0 == *mode)
    };
    modes.iter().copied().filter(has_bars).collect()
}

/// Side by side above the bars.
fn legend(modes: &[Mode], canvas: &Canvas<'_>) -> Result<(), Box<dyn std::error::Error>> {
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

fn colour(mode: Mode) -> RGBColor {
    let (red, green, blue) = mode.colour();
    RGBColor(red, green, blue)
}

fn bars(
    plot: &Plot,
    modes: &[Mode],
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

    fn plot(logarithmic: bool) -> Plot {
        let bar = |mode, value: f64| (mode, Summary::of(&[value, value * 1.2]).unwrap());
        Plot {
            file: "x.svg",
            title: "Things & more".to_owned(),
            unit: "ms",
            logarithmic,
            groups: vec![
                Group {
                    label: "first\nline".to_owned(),
                    bars: vec![bar(Mode::Nft, 60.0), bar(Mode::Tcx, 0.4)],
                },
                Group {
                    label: "second".to_owned(),
                    bars: vec![bar(Mode::Tcx, 0.0)],
                },
            ],
        }
    }

    #[test]
    fn a_plot_has_its_bars_labels_and_legend() {
        for logarithmic in [false, true] {
            let svg = draw(&plot(logarithmic), &[Mode::None, Mode::Nft, Mode::Tcx]).unwrap();
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
            for text in [
                "first",
                "line",
                "second",
                "iptables-nft",
                "ebpf, TCX",
                "Things &amp; more",
            ] {
                assert!(svg.contains(text), "{text} in {svg}");
            }
            assert!(!svg.contains("\nnone\n") && !svg.contains("NaN"), "{svg}");
            let colour = svg.matches("#005AA0").count();
            assert_eq!(colour, 3, "two bars and an entry of the legend in {svg}");
        }
    }
}
