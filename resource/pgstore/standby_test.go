package pgstore_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/pgstore"
)

// Once ctx ends, the server commits without a standby. A failover forgets that, so nothing may report it as done.
func TestMissingStandby(t *testing.T) {
	server := testmain.ServeNoStandby(t, prepare)
	for name, set := range map[string]func(*pgxpool.Config){"closes": func(*pgxpool.Config) {}, "cancels": testmain.Cancels} {
		t.Run(name, func(t *testing.T) {
			pool := testmain.Pool(t, server.Server, set, func(c *pgxpool.Config) { c.MaxConns = 1 })
			s, key := newStore(t, pool, nil), newKey()
			write := func(ctx context.Context) error { return s.Write(ctx, key, at(7), []byte("v")) }
			read := func(f resource.Fence) func(context.Context) error {
				return func(ctx context.Context) error {
					_, err := s.ReadFenced(ctx, key, f)
					return err
				}
			}
			for i, call := range []func(context.Context) error{write, write, read(at(7)), read(resource.Fence{Token: 7})} {
				err := server.Cut(t, call)
				require.ErrorIs(t, err, testmain.ErrCut, i)
				require.ErrorContains(t, err, "(the operation may still take effect)", i)
				require.NotErrorIs(t, err, resource.ErrApplied, i)
			}
			require.EqualValues(t, 4, pool.Stat().NewConnsCount(), "a late cancel request would hit the next call")
			require.Equal(t, at(7), fenceOf(t, pool, key))
			isStale(t, s.Write(t.Context(), key, at(6), nil), key, at(7), at(6), false) // without a standby: nothing depends on it
			isStale(t, s.Write(t.Context(), key, at(7), []byte("w")), key, at(7), at(7), false)

			once := func(ctx context.Context, tx pgx.Tx) error { return pgstore.GuardOnce(ctx, tx, key, at(8), []byte("r")) }
			guard := func(guard func(ctx context.Context, tx pgx.Tx) error) func(context.Context) error {
				return func(ctx context.Context) error {
					return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return guard(ctx, tx) })
				}
			}
			ofToken := func(token uint64) func(context.Context, pgx.Tx) error {
				return func(ctx context.Context, tx pgx.Tx) error {
					return pgstore.GuardRead(ctx, tx, key, resource.Fence{Token: token})
				}
			}
			_ = server.Cut(t, guard(ofToken(7))) // with "cancels", Commit returns nil
			_ = server.Cut(t, guard(once))
			require.ErrorIs(t, guard(once)(t.Context()), resource.ErrApplied)
			_ = server.Cut(t, guard(ofToken(8))) // as the comment of GuardOnce says
		})
	}
	s, key := newStore(t, testmain.Pool(t, server.Server), nil), newKey()
	write := func(ctx context.Context) error { return s.Write(ctx, key, at(7), []byte("v")) }
	require.ErrorIs(t, server.Cut(t, write), testmain.ErrCut)
	require.ErrorIs(t, server.Arrive(t, write), resource.ErrApplied)
}
