package redislock_test

import (
	"context"
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/redisstore"
)

func opened(t *testing.T) (*redis.Client, *dlock.Locker, *redisstore.Store) {
	t.Helper()
	client := redis.NewClient(&redis.Options{Addr: miniredis.RunT(t).Addr(), ContextTimeoutEnabled: true})
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	locker, accounts, err := open(client)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, locker.Close()) })
	return client, locker, accounts
}

// Each invoice, one line or not, is billed once, also when repeated.
func TestBillOnce(t *testing.T) {
	for _, fault := range []string{"none", "reply lost", "request lost", "request late"} {
		t.Run(fault, func(t *testing.T) {
			client, locker, accounts := opened(t)
			ctx := t.Context()
			require.NoError(t, bill(ctx, locker, accounts, "inv-0"), "the script is known from now on")
			w := &writeFault{}
			client.AddHook(hook(w.process))
			for _, invoice := range []string{
				"inv-1", "inv-2\n", "inv-1", "inv-1\n", "inv-1\ninv-2", "inv", "inv-1\ninv-2\n", `"inv`, "inv-3\r\n", "inv-3", "inv-0",
			} {
				w.fault = fault
				if err := bill(ctx, locker, accounts, invoice); err != nil {
					require.ErrorIs(t, err, errFault)
					require.NoError(t, bill(ctx, locker, accounts, invoice), "again, after an error")
				}
				if w.late != nil {
					seen, err := w.late()
					require.NoError(t, err)
					require.NotEmpty(t, seen, "the fence that refuses a write that comes after the retry")
					w.late = nil
				}
			}
			account, err := accounts.Read(ctx, "acme")
			require.NoError(t, err)
			require.Equal(t, []string{`"inv-0"`, `"inv-1"`, `"inv-2"`, `"inv-1\ninv-2"`, `"inv"`, `"\"inv"`, `"inv-3"`},
				strings.Fields(string(account.Value)))
		})
	}
}

var errFault = errors.New("the connection broke")

type writeFault struct {
	fault string
	late  func() ([]string, error) // sends the write that was held back
}

func (w *writeFault) process(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	if len(cmd.Args()) < 7 || cmd.Args()[3] != "resource:{acme}" || w.fault == "none" {
		return next(ctx, cmd)
	}
	switch w.fault {
	case "reply lost":
		_ = next(ctx, cmd)
	case "request late":
		late := redis.NewCmd(context.WithoutCancel(ctx), slices.Clone(cmd.Args())...)
		w.late = func() ([]string, error) {
			if err := next(context.WithoutCancel(ctx), late); err != nil {
				return nil, err
			}
			return late.StringSlice()
		}
	}
	w.fault = "none"
	cmd.SetErr(errFault)
	return errFault
}

// TestRaiseCounter runs the command of docs/operations.md for tokens that have regressed.
func TestRaiseCounter(t *testing.T) {
	page, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	for _, command := range []string{"`redis-cli INCRBY '(fence:[^']*)' ([0-9]+)`", "`redis-cli INCRBY (fence-floor) ([0-9]+)`"} {
		words := regexp.MustCompile(command).FindSubmatch(page)
		require.NotNil(t, words, command)
		client, locker, accounts := opened(t)
		require.NoError(t, accounts.Write(t.Context(), "acme", resource.Fence{Token: 4, Seq: 1}, nil))
		require.ErrorContains(t, bill(t.Context(), locker, accounts, "inv-1"), "seen 4, got 1")
		if string(words[1]) == "fence-floor" {
			require.NoError(t, client.Del(t.Context(), "fence:{billing/acme}").Err())
		}
		require.NoError(t, client.Do(t.Context(), "INCRBY", string(words[1]), string(words[2])).Err())
		require.NoError(t, bill(t.Context(), locker, accounts, "inv-1"))
	}
}
