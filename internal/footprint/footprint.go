// Package footprint measures what locks leave behind in the servers that keep them: memory of keys that have expired and
// of counters that never do, revisions, leases; and what a fencing token costs where it is made.
//
// An experiment is a directory: config.json says what to do, data.jsonl what came of it.
package footprint

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/fill"
)

// Config is an experiment. Its parts are run one after the other.
type Config struct {
	Seed        uint64   `json:"seed"`
	SampleEvery Duration `json:"sample_every"`
	// Limit ends a phase that waits for a server to do something.
	Limit Duration `json:"limit"`

	Redis  *RedisConfig `json:"redis,omitempty"`
	Etcd   *EtcdConfig  `json:"etcd,omitempty"`
	Tokens *TokenConfig `json:"tokens,omitempty"`
}

// Duration is a time.Duration that reads as "10s" in JSON.
type Duration struct{ time.Duration }

// MarshalText writes d as time.Duration prints it.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads what time.ParseDuration reads.
func (d *Duration) UnmarshalText(b []byte) (err error) {
	d.Duration, err = time.ParseDuration(string(b))
	return err
}

// The kinds of a [Line].
const (
	KindSetup  = "setup"  // the first line: where all of the others were measured
	KindSample = "sample" // a moment within a phase
	KindPhase  = "phase"  // a phase that has ended, with the sample at its end
	KindCost   = "cost"   // what tokens of one source cost
	KindTokens = "tokens" // tokens of two keys in turns
)

// Line is a line of data.jsonl.
type Line struct {
	Kind string `json:"kind"`

	Setup *Setup `json:"setup,omitempty"`

	Run   string  `json:"run,omitempty"`   // a server and what was done to it: "redis active", "etcd leases"
	Phase string  `json:"phase,omitempty"` // "fill"
	T     float64 `json:"t,omitempty"`     // seconds since the run began
	// Of a phase: how long it took, and how many operations it was. Of a sample: how many locks have been asked for.
	Seconds float64 `json:"seconds,omitempty"`
	Count   uint64  `json:"count,omitempty"`

	Redis *fill.RedisSample `json:"redis,omitempty"`
	Etcd  *fill.EtcdSample  `json:"etcd,omitempty"`
	// Values are what a phase has found out, by name.
	Values map[string]float64 `json:"values,omitempty"`

	Cost   *Cost   `json:"cost,omitempty"`
	Tokens *Tokens `json:"tokens,omitempty"`
}

// Setup is the machine and what ran on it.
type Setup struct {
	Start   time.Time `json:"start"`
	OS      string    `json:"os"`
	Arch    string    `json:"arch"`
	Cores   int       `json:"cores"`
	Go      string    `json:"go"`
	Servers []string  `json:"servers"` // as they say, "redis 7.0.15 (local)"
	Config  Config    `json:"config"`
}

// Decode reads the lines of a data.jsonl.
func Decode(r io.Reader) ([]Line, error) {
	var all []Line
	dec := json.NewDecoder(r)
	dec.DisallowUnknownFields()
	for {
		var l Line
		err := dec.Decode(&l)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("footprint: line %d: %w", len(all)+1, err)
		}
		all = append(all, l)
	}
}

// Load reads the config of the experiment in dir.
func Load(dir string) (Config, error) {
	file := filepath.Join(dir, "config.json")
	b, err := os.ReadFile(file)
	if err != nil {
		return Config{}, fmt.Errorf("footprint: %w", err)
	}
	var c Config
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		var of struct {
			Contend json.RawMessage `json:"sweeps"`
		}
		if json.Unmarshal(b, &of) == nil && of.Contend != nil {
			return Config{}, fmt.Errorf("footprint: %s describes an experiment of another command: contend -experiment %s", file, dir)
		}
		return Config{}, fmt.Errorf("footprint: %s: %w", file, err)
	}
	if c.SampleEvery.Duration <= 0 || c.Limit.Duration <= 0 {
		return Config{}, fmt.Errorf("footprint: %s: sample_every and limit must be positive", file)
	}
	if c.Redis == nil && c.Etcd == nil && c.Tokens == nil {
		return Config{}, fmt.Errorf("footprint: %s has none of redis, etcd and tokens: there is nothing to do", file)
	}
	return c, nil
}

// Record plays the experiment in dir on servers that it starts, and replaces its data.jsonl if [Check] finds nothing wrong.
// It tells progress what it is at.
func Record(ctx context.Context, dir string, progress io.Writer) error {
	c, err := Load(dir)
	if err != nil {
		return err
	}
	file := filepath.Join(dir, "data.jsonl")
	if err := cli.Replaceable(file); err != nil {
		return fmt.Errorf("footprint: %w", err)
	}
	r := &recorder{config: c, progress: progress}
	if c.Redis != nil {
		for _, run := range []func(context.Context) error{r.redisActive, r.redisLazy} {
			if err := run(ctx); err != nil {
				return fmt.Errorf("footprint: redis: %w", err)
			}
		}
	}
	if c.Etcd != nil {
		for _, run := range []func(context.Context) error{r.etcdShared, r.etcdLeases} {
			if err := run(ctx); err != nil {
				return fmt.Errorf("footprint: etcd: %w", err)
			}
		}
	}
	if c.Tokens != nil {
		if err := r.tokens(ctx); err != nil {
			return fmt.Errorf("footprint: tokens: %w", err)
		}
	}
	return r.write(file)
}

// recorder plays an experiment.
type recorder struct {
	config   Config
	progress io.Writer
	servers  []string
	start    time.Time
	lines    []Line

	run   string
	began time.Time // the run
}

// begin starts a run on a server.
func (r *recorder) begin(run, server string) error {
	if r.start.IsZero() {
		r.start = time.Now()
	}
	r.run, r.began = run, time.Now()
	r.uses(server)
	return r.say("%s", run)
}

// uses notes that a server took part.
func (r *recorder) uses(server string) {
	if !slices.Contains(r.servers, server) {
		r.servers = append(r.servers, server)
	}
}

func (r *recorder) say(format string, args ...any) error {
	_, err := fmt.Fprintf(r.progress, format+"\n", args...)
	return err
}

func (r *recorder) add(l Line) { r.lines = append(r.lines, l) }

// watch is a server's sampler.
type watch func(ctx context.Context) (*fill.RedisSample, *fill.EtcdSample, error)

// phase does something, samples the server meanwhile, and records both. do returns how many operations it did, and what it
// found. done, if not nil, tells how many it has done so far.
func (r *recorder) phase(ctx context.Context, name string, w watch, done func() uint64,
	do func(ctx context.Context) (uint64, map[string]float64, error),
) error {
	began := time.Now()
	var pings []fill.Pings
	line := func(kind string) (Line, error) {
		l := Line{Kind: kind, Run: r.run, Phase: name, T: time.Since(r.began).Seconds()}
		if done != nil {
			l.Count = done()
		}
		var err error
		l.Redis, l.Etcd, err = w(ctx)
		if p := l.pings(); p.Count > 0 {
			pings = append(pings, *p)
		}
		return l, err
	}
	type result struct {
		count  uint64
		values map[string]float64
		err    error
		took   time.Duration
	}
	inner, cancel := context.WithTimeoutCause(ctx, r.config.Limit.Duration, fmt.Errorf("it took longer than %v, the limit", r.config.Limit))
	defer cancel()
	results := make(chan result, 1)
	go func() {
		count, values, err := do(inner)
		results <- result{count, values, err, time.Since(began)}
	}()
	tick := time.NewTicker(r.config.SampleEvery.Duration)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			l, err := line(KindSample)
			if err != nil {
				cancel()
				return errors.Join(err, (<-results).err)
			}
			r.add(l)
		case res := <-results:
			if res.err != nil {
				if inner.Err() != nil && !errors.Is(res.err, context.Cause(inner)) {
					res.err = fmt.Errorf("%w: %w", context.Cause(inner), res.err)
				}
				return fmt.Errorf("%s, %s: %w", r.run, name, res.err)
			}
			l, err := line(KindPhase)
			if err != nil {
				return err
			}
			l.Seconds, l.Count, l.Values = res.took.Seconds(), res.count, res.values
			*l.pings() = together(pings)
			r.add(l)
			var server fmt.Stringer = l.Redis
			if l.Etcd != nil {
				server = l.Etcd
			}
			return r.say("  %-8s %8s in %7.1f s (%s/s)  %v", name, fill.Short(float64(res.count)), l.Seconds,
				fill.Short(fill.Rate(res.count, res.took)), server)
		}
	}
}

// pings are those of the sample.
func (l *Line) pings() *fill.Pings {
	if l.Etcd != nil {
		return &l.Etcd.Pings
	}
	return &l.Redis.Pings
}

// together sums the pings of a phase's samples up. The median is that of the samples' medians.
func together(all []fill.Pings) (sum fill.Pings) {
	if len(all) == 0 {
		return sum
	}
	slices.SortFunc(all, func(a, b fill.Pings) int { return cmp.Compare(a.PingP50, b.PingP50) })
	sum.PingP50 = all[len(all)/2].PingP50
	for _, p := range all {
		sum.Count += p.Count
		sum.PingMax = max(sum.PingMax, p.PingMax)
	}
	return sum
}

// pause waits for d, for a server to come to what it does in the background.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// until calls ready every 50 ms until it returns true.
func until(ctx context.Context, ready func(ctx context.Context) (bool, error)) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := ready(ctx)
		if ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// write checks the lines, and writes them.
func (r *recorder) write(file string) error {
	head := Line{Kind: KindSetup, Setup: &Setup{
		Start: r.start.UTC().Truncate(time.Second), OS: runtime.GOOS, Arch: runtime.GOARCH, Cores: runtime.NumCPU(), Go: runtime.Version(),
		Servers: r.servers, Config: r.config,
	}}
	lines := append([]Line{head}, r.lines...)
	if err := Check(lines); err != nil {
		return fmt.Errorf("%s stays as it was: %w", file, err)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	for _, l := range lines {
		if err := enc.Encode(l); err != nil {
			return fmt.Errorf("footprint: %w", err)
		}
	}
	if err := cli.ReplaceFile(file, b.Bytes()); err != nil {
		return fmt.Errorf("footprint: %w", err)
	}
	return nil
}
