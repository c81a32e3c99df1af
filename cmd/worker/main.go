// Command worker does a job under a lock: it acquires, works, writes with the fencing token and releases.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/internal/server"
	"github.com/fencelab/fencelab/resource"
)

var command = cli.Command{
	Name: "worker",
	About: `
Takes the lock of a key, reads the key's ledger from a resource (cmd/resource, or
a database: -resource), works, appends an entry of its own, writes the ledger back
with the fencing token and releases the lock. It prints each point that it reaches.

Run two of them on one key, freeze the first one for longer than its TTL, and see
what its late write does: -pause delays it between read and write; kill -STOP and
kill -CONT freeze it for real, renewals and all.`,
	Examples: `
  worker -name A -ttl 2s -pause 5s &       # holds the lock, and is late
  sleep 1; worker -name B                  # its successor
  curl http://127.0.0.1:8080/r/demo        # whose entries are in the ledger?

  worker -name A -resource postgres        # directly to a database table, which is created if necessary

  worker -n 0 -work 50ms -renew 1s -metrics 127.0.0.1:9100   # until interrupted, with metrics`,
}

func main() { cli.Main(run) }

func run(ctx context.Context, args []string, stdout io.Writer) error {
	w := worker{stdout: stdout}
	var fs flag.FlagSet
	host, _ := os.Hostname()
	fs.StringVar(&w.name, "name", fmt.Sprintf("%s-%d", host, os.Getpid()), "`name` of this worker: its entry in the ledger")
	fs.StringVar(&w.key, "key", "demo", "`key` of the lock and of the ledger")
	lock := fs.String("lock", locks.Redis, "`URL` of the lock service:\n"+locks.URLs+";\n"+
		"or one of "+strings.Join(locks.Names(), ", ")+": at the usual address on this host, as in deploy/compose.yaml")
	fs.StringVar(&w.resource, "resource", stores.Addr(stores.HTTP), "`URL` of the resource, or of a store to write to directly:\n"+stores.Addresses+";\n"+
		"or one of "+strings.Join(stores.Names(), ", ")+": at the usual address on this host, as in deploy/compose.yaml")
	fs.StringVar(&w.token, "token", "", "bearer `token` for the resource, if it is cmd/resource")
	fs.DurationVar(&w.lock.TTL, "ttl", dlock.DefaultTTL, "how long a lease lasts unless it is renewed")
	fs.DurationVar(&w.lock.Renew.Every, "renew", 0, "time between renewals in the background; 0: none")
	fs.DurationVar(&w.lock.Renew.MaxHold, "max-hold", time.Minute, "with -renew: stop renewing a lease after this long")
	fs.DurationVar(&w.work, "work", 0, "how long the work takes, between read and write")
	fs.DurationVar(&w.pause, "pause", 0, "a delay between read and write, after the work; renewals continue")
	fs.DurationVar(&w.wait, "wait", 0, "maximum time to wait for the lock; 0: until interrupted")
	fence := cli.Choice(&fs, "fence", "read and write with the token, write with it only,\nor send none (to a store, or a resource with -fence off)", "on", "writes", "off")
	check := cli.Choice(&fs, "check", "check the lease right before the write, and give up if it is lost", "off", "on")
	fs.IntVar(&w.n, "n", 1, "number of jobs; 0: until interrupted")
	fs.StringVar(&w.metrics, "metrics", "", "`host:port` for /metrics and /healthz; port 0 picks a free one, which is printed; empty: none")
	w.lock.Logger = cli.Logger(&fs)
	if err := command.Parse(&fs, args, stdout); err != nil {
		return err
	}
	if w.n < 0 || w.work < 0 || w.pause < 0 || w.wait < 0 {
		return errors.New("worker: -n, -work, -pause and -wait must not be negative")
	}
	if w.lock.Renew.Every == 0 {
		w.lock.Renew.MaxHold = 0 // it limits renewals
	}
	if slices.Contains(stores.Names(), w.resource) {
		w.resource = stores.Addr(w.resource)
	}
	w.fence, w.check = *fence, *check == "on"
	var err error
	if w.backend, err = locks.Parse(*lock); err != nil {
		return fmt.Errorf("worker: -lock: %w", err)
	}
	w.backend.TTL = w.lock.TTL
	return w.run(ctx)
}

type worker struct {
	stdout io.Writer

	name, key, resource, token, metrics string

	backend           locks.Spec
	lock              dlock.Options
	work, pause, wait time.Duration
	fence             string
	check             bool
	n                 int
}

func (w *worker) run(ctx context.Context) (err error) {
	if _, err := dlock.New(struct{ dlock.Backend }{}, &w.lock); err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	var ln net.Listener
	if w.metrics != "" {
		if ln, err = cli.Listen(ctx, "metrics", w.metrics); err != nil {
			return fmt.Errorf("worker: %w", err)
		}
		defer func() { _ = ln.Close() }()
	}
	var store *stores.Store
	if err := cli.Reach(ctx, func(ctx context.Context) (err error) {
		store, err = stores.Open(ctx, w.resource, stores.Options{Token: w.token})
		return err
	}); err != nil {
		return fmt.Errorf("worker: -resource: %w", err)
	}
	defer func() { err = errors.Join(err, store.Close()) }()

	reg := prometheus.NewRegistry()
	w.lock.Registerer = reg
	backend, err := locks.Reach(ctx, w.backend)
	if err != nil {
		return fmt.Errorf("worker: %v (-lock) doesn't answer: %w", w.backend, err)
	}
	locker, err := dlock.New(backend, &w.lock)
	if err != nil {
		return errors.Join(err, backend.Close())
	}
	defer func() { err = errors.Join(err, locker.Close()) }()
	if ln != nil {
		if _, err := fmt.Fprintf(w.stdout, "metrics on http://%s/metrics\n", ln.Addr()); err != nil {
			return err
		}
		stop := server.StartMetrics(ctx, ln, reg, backend.Ping, w.lock.Logger)
		defer func() { err = errors.Join(err, stop()) }()
	}
	return w.jobs(ctx, locker, store)
}

// The backoff after a refusal, with -n 0.
const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 5 * time.Second
)

// jobs runs the jobs. If all are refused, the last refusal is the error.
func (w *worker) jobs(ctx context.Context, l *dlock.Locker, store *stores.Store) error {
	wrote := false
	var refusal error
	var backoff time.Duration
	for i := 1; w.n == 0 || i <= w.n; i++ {
		refused, err := w.once(ctx, l, store, i)
		if w.n == 0 && ctx.Err() != nil {
			break // any error is due to that
		}
		switch {
		case err != nil:
			if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
				return fmt.Errorf("worker: %w (is %v (-lock), and the resource at %s (-resource)?)", err, w.backend, stores.Redacted(w.resource))
			}
			return fmt.Errorf("worker: %w", err)
		case refused == nil:
			wrote, backoff = true, 0
		default:
			refusal, backoff = refused, min(max(2*backoff, minBackoff), maxBackoff)
		}
		if w.n == 0 && backoff > 0 {
			_ = jitter.Sleep(ctx, backoff) // the loop checks ctx
		}
	}
	switch {
	case wrote || w.n == 0:
		return nil
	case errors.Is(refusal, errGaveUp):
		return fmt.Errorf("worker: %w (-check): set a longer -ttl, or -renew", refusal)
	default:
		return fmt.Errorf("worker: %w (that is fencing at work if another worker has written; if not, earlier tokens came "+
			"from another lock service, or this one has lost its own%s)", refusal, w.recovery(refusal))
	}
}

// recovery returns what the error is to add: the command of docs/operations.md that lets holders write again, unless refusal
// says it.
func (w *worker) recovery(refusal error) string {
	stale, _ := errors.AsType[*resource.StaleTokenError](refusal)
	if stale == nil || stale.Got.Token >= stale.Seen.Token {
		return ": take another -key"
	}
	key := "'" + strings.ReplaceAll(w.key, "'", `'\''`) + "'"
	const maxToken = 1<<53 - 1 // the greatest token of these locks
	if slices.Contains([]string{locks.Redis, locks.Postgres, locks.S3}, w.backend.Lock) && stale.Seen.Token < maxToken {
		return fmt.Sprintf(": raise the lock's counter: fencelab fence set -counter LOCK-URL %s %d", key, stale.Seen.Token)
	}
	if stale.Seen.Token > maxToken && stale.Got.Token <= maxToken {
		return ""
	}
	return fmt.Sprintf(": stop all holders and lower the fence: fencelab fence set -force STORE-URL %s %d, "+
		"or for cmd/resource, with the server stopped: resource -file FILE -set-fence KEY=%[2]d", key, stale.Got.Token)
}

var errGaveUp = errors.New("the lease was lost before the write")

// once does a job. refused says why a job without failures wrote nothing. The lock is always released.
func (w *worker) once(ctx context.Context, l *dlock.Locker, store *stores.Store, i int) (refused, err error) {
	entry := w.name
	if w.n != 1 {
		entry = fmt.Sprintf("%s.%d", w.name, i)
	}
	h, err := locks.Acquire(ctx, l, w.key, w.wait)
	if err != nil {
		return nil, err
	}
	err = w.print(entry, "acquired token %d, lease %v until %s", h.Fence(), h.TTL(), clock(h.Until()))
	if err == nil {
		refused, err = w.write(ctx, h, store, entry)
	}
	switch lost := h.Release(ctx); {
	case lost == nil:
		err = errors.Join(err, w.print(entry, "released"))
	case errors.Is(lost, dlock.ErrLost):
		err = errors.Join(err, w.print(entry, "release-lost"))
	default:
		err = errors.Join(err, fmt.Errorf("release: %w", lost))
	}
	return refused, err
}

// write doesn't use the lease's context: a cancelled request may still arrive.
func (w *worker) write(ctx context.Context, h *dlock.Handle, store *stores.Store, entry string) (refused, err error) {
	refusal := func(err error, outcome string) (refused, failed error) {
		if _, stale := errors.AsType[*resource.StaleTokenError](err); !stale {
			return nil, err
		}
		return err, w.print(entry, "%s", outcome)
	}
	var rec resource.Record
	if w.fence == "on" {
		rec, err = store.ReadFenced(ctx, w.key, resource.NewFence(h.Next()))
	} else {
		rec, err = store.Read(ctx, w.key)
	}
	if err != nil && !errors.Is(err, resource.ErrNotFound) { // the ledger's first entry
		return refusal(err, "read-stale")
	}
	if err := w.print(entry, "read %v", strings.Fields(string(rec.Value))); err != nil {
		return nil, err
	}
	if err := jitter.Sleep(ctx, w.work+w.pause); err != nil {
		return nil, err
	}
	if w.check && h.Context().Err() != nil {
		return errGaveUp, w.print(entry, "lost-lease")
	}
	ledger := append(rec.Value, entry+"\n"...)
	if w.fence == "off" {
		err = store.WriteUnfenced(ctx, w.key, ledger)
	} else {
		err = store.Write(ctx, w.key, resource.NewFence(h.Next()), ledger)
	}
	if err != nil && !errors.Is(err, resource.ErrApplied) {
		return refusal(err, "write-stale")
	}
	return nil, w.print(entry, "wrote")
}

func (w *worker) print(entry, format string, args ...any) error {
	_, err := fmt.Fprintf(w.stdout, "%s %s %s\n", clock(time.Now()), entry, fmt.Sprintf(format, args...))
	return err
}

func clock(t time.Time) string { return t.Format("15:04:05.000") }
