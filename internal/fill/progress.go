package fill

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// Bar shows how far a fill has come: on a terminal some lines that are drawn again and again, elsewhere a line each time.
type Bar struct {
	w        io.Writer
	terminal bool
	total    uint64
	began    time.Time
	last     time.Time // of the last drawing
	done     uint64    // at that time
	rows     int       // of the last drawing, on a terminal
}

// columns are as many as a terminal has at least. A line that is longer goes on in the next row, and a drawing over it would
// leave its first row behind.
const columns = 79

// NewBar starts to count time now.
func NewBar(w io.Writer, total uint64) *Bar {
	now := time.Now()
	return &Bar{w: w, terminal: isTerminal(w), total: total, began: now, last: now}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// Show tells that done are done, and what more there is to say.
func (b *Bar) Show(done uint64, more string) error {
	return b.show(time.Now(), done, more)
}

func (b *Bar) show(now time.Time, done uint64, more string) error {
	rate := Rate(done-b.done, now.Sub(b.last))
	b.last, b.done = now, done
	const cells = 20
	part := 1.0
	if b.total > 0 {
		part = float64(done) / float64(b.total)
	}
	fields := []string{
		fmt.Sprintf("%5.1f %%", 100*part), Short(float64(done)) + " of " + Short(float64(b.total)), Short(rate) + "/s",
	}
	if mean := Rate(done, now.Sub(b.began)); done < b.total && mean > 0 { // the mean, for the last moment's rate would make it jump
		fields = append(fields, fmt.Sprintf("ETA %v", time.Duration(float64(b.total-done)/mean*float64(time.Second)).Round(time.Second)))
	}
	if more != "" {
		fields = append(fields, strings.Split(more, gap)...)
	}
	if !b.terminal {
		_, err := fmt.Fprintln(b.w, strings.Join(fields, gap))
		return err
	}
	full := int(part * cells)
	fields[0] = "[" + strings.Repeat("=", full) + strings.Repeat(" ", cells-full) + "] " + fields[0]
	rows := wrap(fields, columns)
	start := "\r"
	if b.rows > 1 {
		start += fmt.Sprintf("\x1b[%dA", b.rows-1) // up
	}
	b.rows = len(rows)
	_, err := fmt.Fprint(b.w, start+"\x1b[J"+strings.Join(rows, "\n")) // over what was there, to the screen's end
	return err
}

// gap stands between fields.
const gap = "  "

// wrap puts fields into rows of so many letters, as far as none is longer by itself.
func wrap(fields []string, width int) []string {
	rows := []string{fields[0]}
	for _, f := range fields[1:] {
		if last := &rows[len(rows)-1]; len(*last)+len(gap)+len(f) <= width {
			*last += gap + f
		} else {
			rows = append(rows, f)
		}
	}
	return rows
}

// End leaves the terminal's last line.
func (b *Bar) End() error {
	if !b.terminal {
		return nil
	}
	_, err := fmt.Fprintln(b.w)
	return err
}

// Rate is how many a second.
func Rate(n uint64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return float64(n) / d.Seconds()
}

// Short is a number with three digits: 950, 1.25k, 10M.
func Short(v float64) string {
	for _, unit := range []string{"", "k", "M", "G"} {
		if v < 999.5 || unit == "G" {
			return strings.TrimSpace(fmt.Sprintf("%.3g%s", v, unit))
		}
		v /= 1000
	}
	return ""
}
