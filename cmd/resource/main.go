// Command resource serves a store that refuses writes with stale fencing tokens over HTTP.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/server"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
)

var command = cli.Command{
	Name: "resource",
	About: `
The resource that locks protect. It accepts a write only if its fencing token is
greater than every token that it has accepted for the key; otherwise it replies 409.
So a holder that was paused past its lease can't overwrite its successor's work.
An accepted write survives a crash: it is on disk before the reply is sent.

  PUT /r/{key}   with X-Fence-Token: N writes the body; X-Fence-Seq: 2, 3, ...
                 for the same holder's second and later writes
  GET /r/{key}   reads; with X-Fence-Token: N it also refuses later writes of
                 earlier holders, which a read-modify-write needs
  GET /metrics   resource_stale_token_rejections_total and others
  GET /healthz   200 if the store answers`,
	Examples: `
  resource                               # on 127.0.0.1:8080, records in resource.db
  resource -addr 127.0.0.1:0 -store memory
  FENCELAB_TOKEN=secret resource -addr :8443 -tls-cert cert.pem -tls-key key.pem

  curl -X PUT -H 'X-Fence-Token: 7' -d paid http://127.0.0.1:8080/r/order-1
  curl -X PUT -H 'X-Fence-Token: 6' -d late http://127.0.0.1:8080/r/order-1   # 409
  curl http://127.0.0.1:8080/r/order-1

  resource -set-fence order-1=7          # after a wrong token; stop the server first`,
}

func main() { cli.Main(run) }

func run(ctx context.Context, args []string, stdout io.Writer) (err error) {
	var fs flag.FlagSet
	var opts server.Options
	addr := fs.String("addr", "127.0.0.1:8080",
		"`host:port` to listen on; port 0 picks a free one and prints it;\nfd:N is a listening socket passed by the parent process")
	storeKind := cli.Choice(&fs, "store", "keep records in a file, or in memory until the process ends", "bolt", "memory")
	file := fs.String("file", "resource.db",
		"`path` of the file for -store bolt; created if there is none;\non a local file system only: on NFS its lock is a lease")
	fence := cli.Choice(&fs, "fence", "off accepts every write, to show what goes wrong without fencing;\nwrites equals on: the worker decides whether reads have a token", "on", "writes", "off")
	fs.Int64Var(&opts.Handler.MaxBody, "max-body", resource.DefaultMaxBody,
		fmt.Sprintf("largest value in `bytes`, at most %d", boltstore.MaxValue))
	unwritten := fs.Uint64("max-unwritten", 1<<20, "with -store bolt: limit for `keys` that only fenced reads have touched, at least 1")
	jump := fs.Uint64("max-jump", 0,
		"refuse a token that exceeds the greatest one seen for its key by more than `N`;\na new key has seen 0; 0: no limit")
	newFence := fs.String("set-fence", "", "with -store bolt: set the fence of a key, `KEY=TOKEN`, and exit; stop the server and the holders first")
	list := fs.Bool("list", false, "with -store bolt: print each key's fence and the key, and exit; stop the server first")
	fs.StringVar(&opts.Handler.Token, "token", "",
		"bearer `token` that requests for /r/ must send; set it in the environment to hide it from ps")
	certFile := fs.String("tls-cert", "", "`path` of the TLS certificate in PEM; needs -tls-key")
	keyFile := fs.String("tls-key", "", "`path` of the TLS certificate's key in PEM; needs -tls-cert")
	opts.Logger = cli.Logger(&fs)
	if err := command.Parse(&fs, args, stdout); err != nil {
		return err
	}
	if opts.Handler.MaxBody < 1 || opts.Handler.MaxBody > boltstore.MaxValue {
		return fmt.Errorf("resource: -max-body is %d; it must be from 1 to %d", opts.Handler.MaxBody, boltstore.MaxValue)
	}
	if *unwritten == 0 {
		return errors.New("resource: -max-unwritten is 0; it must be at least 1")
	}
	switch {
	case *storeKind != "bolt" && (*newFence != "" || *list):
		return fmt.Errorf("resource: -set-fence and -list are for -store bolt, not %s", *storeKind)
	case *newFence != "":
		return inFile(*file, func(store *boltstore.Store) error { return setFence(ctx, store, *file, *newFence, stdout) })
	case *list:
		return inFile(*file, func(store *boltstore.Store) error { return listFences(ctx, store, stdout) })
	}
	scheme := "http"
	if *certFile != "" || *keyFile != "" {
		cert, err := tls.LoadX509KeyPair(*certFile, *keyFile)
		if err != nil {
			return fmt.Errorf("resource: -tls-cert and -tls-key: %w", err)
		}
		scheme, opts.TLS = "https", &tls.Config{Certificates: []tls.Certificate{cert}}
	}
	opts.Handler.Unfenced = *fence == "off"

	ln, err := cli.Listen(ctx, "addr", *addr)
	if err != nil {
		return fmt.Errorf("resource: %w", err)
	}
	var store resource.Store = resource.NewMemory()
	if *storeKind == "bolt" {
		before, missing := os.Stat(*file)
		if store, err = boltstore.Open(*file, &boltstore.Options{MaxUnwritten: *unwritten}); err != nil {
			return errors.Join(fmt.Errorf("resource: -file: %w", err), ln.Close())
		}
		if missing != nil || before.Size() == 0 {
			opts.Logger.Warn("the file is new and has no fences: if there was one before, stop and check -file, or stale tokens are accepted",
				"file", *file)
		}
	}
	if *jump > 0 && !opts.Handler.Unfenced {
		store = resource.LimitJumps(store, *jump)
	}
	if opts.Handler.Unfenced {
		opts.Logger.Warn("FENCING IS OFF: stale writes are accepted and will corrupt data (-fence off)")
	}
	if a, ok := ln.Addr().(*net.TCPAddr); ok && !a.IP.IsLoopback() && opts.Handler.Token == "" {
		opts.Logger.Warn("anyone who reaches this address may write: set -token, or bind to 127.0.0.1", "addr", a)
	}
	if _, err := fmt.Fprintf(stdout, "listening on %s://%s\n", scheme, ln.Addr()); err != nil {
		return errors.Join(err, ln.Close(), store.Close())
	}
	return server.Serve(ctx, ln, store, opts)
}

func inFile(file string, do func(*boltstore.Store) error) error {
	switch info, err := os.Stat(file); {
	case err != nil:
		return fmt.Errorf("resource: -file: %w", err)
	case info.Size() == 0:
		return fmt.Errorf("resource: -file: %s is empty", file)
	}
	store, err := boltstore.Open(file, nil)
	if err != nil {
		return err
	}
	return errors.Join(do(store), store.Close())
}

func listFences(ctx context.Context, store *boltstore.Store, stdout io.Writer) error {
	keys, err := store.Keys(ctx)
	for _, key := range keys {
		rec, failed := store.Read(ctx, key)
		if failed == nil {
			_, failed = fmt.Fprintf(stdout, "%v\t%s\n", rec.MaxFence, key)
		}
		err = errors.Join(err, failed)
	}
	return err
}

func setFence(ctx context.Context, store *boltstore.Store, file, assignment string, stdout io.Writer) error {
	at := strings.LastIndex(assignment, "=")
	if at < 0 {
		return fmt.Errorf("resource: -set-fence is %q; it must be of the form KEY=TOKEN", assignment)
	}
	key := assignment[:at]
	token, err := strconv.ParseUint(assignment[at+1:], 10, 64)
	if err != nil {
		return fmt.Errorf("resource: -set-fence is %q; after the = it must have an integer from 1 to %d", assignment, uint64(math.MaxUint64))
	}
	rec, err := store.Read(ctx, key)
	if err == nil {
		err = store.SetFence(ctx, key, token)
	}
	if errors.Is(err, resource.ErrNotFound) {
		err = fmt.Errorf("resource: -set-fence: %s has no record of %q: if the key is right, start the server where no client "+
			"reaches it, without -max-jump, and create it: fencelab fence set -force URL KEY TOKEN", file, key)
	}
	if err == nil {
		_, err = fmt.Fprintf(stdout, "the fence of %q was %v and is %v\n", key, rec.MaxFence, resource.Fence{Token: token})
	}
	return err
}
