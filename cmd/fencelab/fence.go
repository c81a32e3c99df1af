package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/filestore"
)

const fenceAbout = `
Shows or raises the fence of the resource KEY in a store, printed as TOKEN.SEQ, or as
TOKEN if SEQ is 1, or with -counter the last token of the lock KEY at redis://,
postgres:// or s3://. A filestore is file://DIRECTORY: stop its gatekeeper, and run this
as its user. With -force it also creates a missing one and, once you have stopped all
holders, lowers one or replaces a Redis counter that isn't a number.`

const fenceExamples = `
  fencelab fence show postgres://app@db/app acme
  fencelab fence set -counter redis://127.0.0.1:6379 billing/acme 10   # the lock has lost its tokens
  fencelab fence set -force postgres://app@db/app acme 7               # the store got a wrong token`

const lastCounter = 1<<53 - 2 // the greatest that has a successor

func runFence(ctx context.Context, args []string, stdout io.Writer) (err error) {
	switch {
	case len(args) > 0 && (args[0] == "show" || args[0] == "set"):
	case len(args) > 0 && slices.Contains(helpFlags, args[0]):
		args = []string{"show|set", "-h"}
	default:
		return misuse(errors.New("fencelab: want fence show or fence set ('fencelab fence -h' describes them)"))
	}
	c := cli.Command{Name: "fencelab fence " + args[0], Args: "URL KEY", About: fenceAbout, Examples: fenceExamples}
	var fs flag.FlagSet
	token, force, n := bearer(&fs), false, 2
	isCounter := fs.Bool("counter", false, "the last token of a lock instead of a store's fence")
	set := args[0] != "show"
	if set { // also for help on both
		fs.BoolVar(&force, "force", false, "also lower it, create it for a key that has none, or replace a Redis counter that isn't a number")
		c.Args, n = "URL KEY TOKEN", 3
		if args[0] != "set" {
			c.Args = "URL KEY [TOKEN]"
		}
	}
	if args, err = parse(c, &fs, n, args[1:], stdout); err != nil {
		return err
	}
	what := fmt.Sprintf("the fence of %q", args[1])
	if *isCounter {
		what = fmt.Sprintf("the last token of the lock %q", args[1])
	}
	var to uint64
	if set {
		if to, err = strconv.ParseUint(args[2], 10, 64); err != nil || to == 0 || *isCounter && to > lastCounter {
			return misuse(fmt.Errorf("%s: %q is not a token: want a number from 1, with -counter up to %d", c.Name, args[2], uint64(lastCounter)))
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, probeTimeout, fmt.Errorf("no answer within %v", probeTimeout))
	defer cancel()
	f, err := openFence(ctx, args[0], *token, *isCounter)
	if err != nil {
		return fmt.Errorf("%s: %s: %w", c.Name, what, err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	rec, err := f.Read(ctx, args[1])
	old, unreadable := rec.MaxFence, errors.Is(err, errNotANumber)
	before := "was " + old.String()
	if unreadable { // or fence-floor, which still can't be
		before = "couldn't be read"
	}
	switch notFound := errors.Is(err, resource.ErrNotFound); {
	case notFound && !set:
		err = fmt.Errorf("%w; want the resource's key, or -counter and the lock's", err)
	case notFound && !force: // the key may be a typo
		err = fmt.Errorf("%w; add -force to create it", err)
	case notFound, unreadable && force:
		err = nil
	}
	switch {
	case err != nil:
	case *isCounter && old.Token == 0 && !force:
		err = fmt.Errorf("there is none in %s: the lock has never been granted, its tokens are lost, or it has another prefix or table, "+
			"which this command doesn't check", f.(interface{ where(key string) string }).where(args[1]))
		if set {
			err = fmt.Errorf("%w; add -force to create it", err)
		}
	case !set:
		_, err = fmt.Fprintf(stdout, "%s is %v\n", what, old)
	case to < old.Token && !force:
		err = fmt.Errorf("it is %v, and %d would lower it: stop all holders and add -force", old, to)
	default:
		// A counter has no Seq: one that is set to what it is isn't lowered, and a holder may raise it meanwhile.
		lower := to < old.Token || !*isCounter && to == old.Token && old.Seq > 0
		if err = f.set(ctx, args[1], to, force && (unreadable || lower)); err == nil {
			rec, err = f.Read(ctx, args[1]) // a holder may have raised it meanwhile
		}
		if err == nil {
			_, err = fmt.Fprintf(stdout, "%s %s and is %v\n", what, before, rec.MaxFence)
		}
	}
	if err != nil {
		err = fmt.Errorf("%s: %s: %w", c.Name, what, cli.OrEnd(ctx, err))
	}
	return err
}

type fence interface {
	Read(ctx context.Context, key string) (resource.Record, error)
	// set atomically raises the fence, or with lower lowers it. While the lock is held, a counter is set to one more: its holder
	// may repeat its request and get the counter as its token, which must be no other's.
	set(ctx context.Context, key string, token uint64, lower bool) error
	Close() error
}

func openFence(ctx context.Context, url, token string, isCounter bool) (fence, error) {
	if dir, ok := strings.CutPrefix(url, "file://"); ok && !isCounter {
		s, err := filestore.Open(dir)
		return store{s, s}, err
	}
	spec, err := locks.ParseURL(url)
	switch {
	case err != nil && (isCounter || !errors.Is(err, locks.ErrScheme)):
		return nil, err
	case isCounter && spec.Lock == locks.Postgres:
		return openRow(ctx, url)
	case isCounter && spec.Lock == locks.S3:
		return openObject(ctx, url)
	case err == nil && spec.Lock != locks.Postgres && spec.Lock != locks.Redis && spec.Lock != locks.S3:
		return nil, fmt.Errorf("%s is not a store, and has no counter to set: stop all holders and set the store's fence back: 'fencelab fence set -force STORE-URL KEY TOKEN'", spec.Lock)
	case isCounter:
		return openCounter(ctx, url)
	}
	s, err := stores.Open(ctx, url, stores.Options{Token: token, Prepared: true, Cluster: true})
	if err != nil {
		return nil, err
	}
	setter, _ := s.Store.(resource.FenceSetter)
	return store{s, setter}, nil
}

type store struct {
	resource.Store
	setter resource.FenceSetter // nil: the fence can't be lowered from here
}

func (s store) set(ctx context.Context, key string, token uint64, lower bool) error {
	if !lower {
		_, err := s.ReadFenced(ctx, key, resource.Fence{Token: token})
		return err
	}
	if s.setter == nil {
		return fmt.Errorf("stop the resource, and lower it where the file is: %s", setFence(key, token))
	}
	return s.setter.SetFence(ctx, key, token)
}

// setFence is the shell command that sets a fence of cmd/resource. Without -file it would set one in another file.
func setFence(key string, token uint64) string {
	return fmt.Sprintf("resource -file FILE -set-fence '%s=%d'", strings.ReplaceAll(key, "'", `'\''`), token)
}
