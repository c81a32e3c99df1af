package fill

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// Bar shows how far a fill has come: on a terminal one line that is drawn again and again, elsewhere a line each time.
type Bar struct {
	w        io.Writer
	terminal bool
	total    uint64
	began    time.Time
	last     time.Time // of the last line
	done     uint64    // at that time
	width    int       // of what stands on the terminal's line
}

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
	line := fmt.Sprintf("%5.1f %%  %s of %s  %s/s", 100*part, Short(float64(done)), Short(float64(b.total)), Short(rate))
	if mean := Rate(done, now.Sub(b.began)); done < b.total && mean > 0 { // the mean, for the last moment's rate would make it jump
		line += fmt.Sprintf("  ETA %v", time.Duration(float64(b.total-done)/mean*float64(time.Second)).Round(time.Second))
	}
	if more != "" {
		line += "  " + more
	}
	if !b.terminal {
		_, err := fmt.Fprintln(b.w, line)
		return err
	}
	full := int(part * cells)
	line = "[" + strings.Repeat("=", full) + strings.Repeat(" ", cells-full) + "] " + line
	blank := max(0, b.width-len(line)) // over what a longer line has left there
	b.width = len(line)
	_, err := fmt.Fprint(b.w, "\r"+line+strings.Repeat(" ", blank))
	return err
}

// End leaves the terminal's line.
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
