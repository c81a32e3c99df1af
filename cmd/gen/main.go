// Command gen populates a lock service with many locks, and records their cost.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"strings"
	"time"

	"github.com/fencelab/fencelab/internal/bench/servercost"
	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/open/locks"
)

var command = cli.Command{
	Name: "gen",
	About: `
Takes -keys locks, each on its own key, with the names, leases and fencing tokens
that the lock itself would use, and leaves them. Keys and owners follow from -seed:
a second run finds its own locks, restarts their leases and adds nothing, and one
that was interrupted is completed. (On etcd it finds them held, and leaves them.) A
lease that has ended meanwhile is granted again, with the next token.

Meanwhile it prints the server's memory, keys, expiry and ping times.

With -experiment it runs the experiment that DIRECTORY/config.json describes, on servers
that it starts and ends itself, and writes DIRECTORY/data.jsonl.`,
	Examples: `
  gen -keys 100000 -ttl 10s                     # into Redis on its usual port
  gen -lock redis://localhost:6379 -keys 10000000
  gen -lock etcd -keys 200000
  FENCELAB_TESTBED=local gen -experiment reports/results/ten-million-keys`,
}

func main() { cli.Main(run) }

func run(ctx context.Context, args []string, stdout io.Writer) error {
	g := generator{stdout: stdout}
	var fs flag.FlagSet
	lock := fs.String("lock", locks.Redis, "`URL` of the lock service: redis://HOST:PORT or etcd://HOST:PORT,...;\n"+
		"or redis or etcd: at the usual address on this host, as in deploy/compose.yaml")
	fs.Uint64Var(&g.set.N, "keys", 0, "how many locks to take, a whole `number`; required")
	fs.Uint64Var(&g.set.Seed, "seed", 1, "seed of the keys and owners")
	fs.DurationVar(&g.set.TTL, "ttl", time.Hour, "how long each lease lasts")
	fs.IntVar(&g.workers, "contenders", 512, "requests under way at a time; to Redis they share pipelines")
	experiment := fs.String("experiment", "", "the `directory` of an experiment to run, instead of all of the above")
	if err := command.Parse(&fs, args, stdout); err != nil {
		return err
	}
	if *experiment != "" {
		if err := servercost.Record(ctx, *experiment, stdout); err != nil {
			return fmt.Errorf("gen: %w", err)
		}
		return nil
	}
	var err error
	if g.spec, err = locks.Parse(*lock); err != nil {
		return fmt.Errorf("gen: -lock: %w", err)
	}
	if g.spec.Lock != locks.Redis && g.spec.Lock != locks.Etcd {
		return fmt.Errorf("gen: -lock: gen populates redis and etcd only, not %s", g.spec.Lock)
	}
	if g.set.N == 0 {
		return fmt.Errorf("gen: want -keys: how many locks to take on %v", g.spec)
	}
	for name, positive := range map[string]bool{"ttl": g.set.TTL > 0, "contenders": g.workers > 0} {
		if !positive {
			return fmt.Errorf("gen: -%s %s: it must be more than 0 (the default is %s)", name, fs.Lookup(name).Value, fs.Lookup(name).DefValue)
		}
	}
	g.spec.TTL = g.set.TTL
	if err := g.run(ctx); err != nil {
		return fmt.Errorf("gen: %w", err)
	}
	return nil
}

type generator struct {
	stdout  io.Writer
	spec    locks.Spec
	set     servercost.Set
	workers int
}

func (g *generator) run(ctx context.Context) (err error) {
	backend, server, closeAll, err := servercost.Open(ctx, g.spec)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	if err := cli.Reach(ctx, func(ctx context.Context) error {
		_, err := server.Ask(ctx)
		return err
	}); err != nil {
		return fmt.Errorf("%v (-lock) doesn't answer: %w", g.spec, err)
	}

	var counts servercost.Counts
	show := func() error {
		s, err := server.Sample(ctx)
		if err == nil {
			_, err = fmt.Fprintf(g.stdout, "%s of %s  %v\n", servercost.Short(counts.Done()), servercost.Short(g.set.N), s)
		}
		return err
	}
	began := time.Now()
	if err := servercost.During(ctx, time.Second, func(ctx context.Context) error {
		return servercost.Each(ctx, g.set, g.workers, &counts, servercost.Take(backend))
	}, show); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("interrupted: run it again to complete the set: %w", err)
		}
		if counts.Done() > 0 {
			_, _ = fmt.Fprintf(g.stdout, "to remove them: %s\n", g.remove())
		}
		return fmt.Errorf("after %d locks: %w", counts.Done(), err)
	}
	took, held := time.Since(began), counts.Held.Load()
	if err := show(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(g.stdout, "%d locks taken in %v, %s/s; %d were held\nto remove them: %s\n", counts.Granted.Load(), took.Round(time.Millisecond),
		servercost.Short(float64(counts.Done())/took.Seconds()), held, g.remove())
	if held > 0 && g.spec.Lock == locks.Redis { // etcd can't tell our locks of an earlier run
		return errors.Join(err, fmt.Errorf("%d locks are held by others: wait for their leases to end, or take another -seed", held))
	}
	return err
}

// remove returns the shell command that removes all locks of gen, with any seed. It has no password.
func (g *generator) remove() string {
	if g.spec.Lock == locks.Etcd {
		return fmt.Sprintf("etcdctl --endpoints=%s del --prefix lock/gen/", strings.Join(g.spec.Addrs, ","))
	}
	at := g.spec.Addrs[0]
	if u, err := url.Parse(at); err == nil && u.Host != "" {
		at = u.Scheme + "://" + u.Host + u.Path
	} else {
		at = "redis://" + at
	}
	return fmt.Sprintf("redis-cli -u %s --scan --pattern '*:{gen/*' | xargs -r -n 1000 redis-cli -u %[1]s unlink", at)
}
