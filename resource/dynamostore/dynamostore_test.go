package dynamostore_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"math"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb/types"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/dynamostore"
	"github.com/fencelab/fencelab/resource/internal/awstest"
	"github.com/fencelab/fencelab/resource/internal/eachcall"
	"github.com/fencelab/fencelab/resource/storetest"
)

func TestStore(t *testing.T) {
	client := newClient(transport)
	var tables []string
	t.Cleanup(func() {
		for _, table := range tables {
			_, err := client.DeleteTable(context.Background(), &dynamodb.DeleteTableInput{TableName: &table})
			require.NoError(t, err)
		}
	})
	reopen := func() (resource.Store, error) { return dynamostore.New(client, tables[len(tables)-1]) }
	storetest.Run(t, storetest.Harness{
		New: func() (resource.Store, error) {
			name := "fencelab-" + rand.Text()
			if err := dynamostore.CreateTable(t.Context(), client, name); err != nil {
				return nil, err
			}
			tables = append(tables, name)
			return reopen()
		},
		Reopen: func(s resource.Store) (resource.Store, error) {
			if err := s.Close(); err != nil {
				return nil, err
			}
			return reopen()
		},
		Another: reopen,
	})
}

func TestCreateTableTwice(t *testing.T) {
	require.NoError(t, dynamostore.CreateTable(t.Context(), newClient(transport), table))
}

func refusal(code, more string) awstest.Handle {
	return awstest.Reply(http.StatusBadRequest, `{"__type":"com.amazonaws.dynamodb.v20120810#`+code+`"`+more+`}`)
}

func TestCreateTableWaits(t *testing.T) {
	created, creating := awstest.Reply(200, "{}"), awstest.Reply(200, `{"Table":{"TableStatus":"CREATING"}}`)
	active := awstest.Reply(200, `{"Table":{"TableStatus":"ACTIVE"}}`)
	for _, replies := range [][]awstest.Handle{
		{created, active},
		{refusal("ResourceInUseException", ""), active},
		{created, refusal("ResourceNotFoundException", ""), creating, active},
		{created, creating, creating, active},
	} {
		synctest.Test(t, func(t *testing.T) {
			link := &awstest.Link{}
			link.On(replies...)
			require.NoError(t, dynamostore.CreateTable(t.Context(), newClient(link), "t"))
			require.Zero(t, link.Left())
		})
	}
	denied := refusal("AccessDeniedException", "")
	for _, replies := range [][]awstest.Handle{{denied}, {created, denied}} {
		link := &awstest.Link{}
		link.On(replies...)
		require.ErrorContains(t, dynamostore.CreateTable(t.Context(), newClient(link), "t"), "AccessDenied")
		require.Zero(t, link.Left())
	}
}

// The refusals don't say why, or can't be right.
func TestRefusals(t *testing.T) {
	s, link := open(t)
	const code = "ConditionalCheckFailedException"
	for more, want := range map[string]string{
		"": "did not return the item",
		`,"Item":{"fence":{"S":"00000000000000000004.00000000000000000001"}}`: "was refused by an item whose fence is 4",
		`,"Item":{"fence":{"N":"7"}}`:                                         "its fence has type",
	} {
		link.On(refusal(code, more))
		require.ErrorContains(t, s.Write(t.Context(), rand.Text(), at(5), nil), want)
	}
	link.On(refusal("AccessDeniedException", ""))
	require.ErrorContains(t, s.Overwrite(t.Context(), rand.Text(), at(5), nil), "AccessDenied", "whose fence was not raised")
}

func TestOneRequest(t *testing.T) {
	s, link := open(t)
	ctx, key := t.Context(), rand.Text()
	read := func(token uint64) error { _, err := s.ReadFenced(ctx, key, resource.Fence{Token: token}); return err }
	stale := &resource.StaleTokenError{}
	for _, c := range []struct {
		name  string
		call  func() error
		stale bool
	}{
		{"first write", func() error { return s.Write(ctx, key, at(1), nil) }, false},
		{"write", func() error { return s.Write(ctx, key, at(2), nil) }, false},
		{"refused write", func() error { return s.Write(ctx, key, at(1), nil) }, true},
		{"repeated write", func() error { return s.Write(ctx, key, at(2), nil) }, true},
		{"first fenced read of a grant", func() error { return read(3) }, false},
		{"another", func() error { return read(3) }, false},
		{"refused fenced read", func() error { return read(2) }, true},
		{"read", func() error { _, err := s.Read(ctx, key); return err }, false},
		{"write without a look at the fence", func() error { return s.Overwrite(ctx, key, resource.Fence{}, nil) }, false},
	} {
		err := c.call()
		require.Equal(t, c.stale, errors.As(err, &stale), c.name)
		require.Equal(t, 1, link.Total(), c.name)
	}
}

// Every read of a single-node server is consistent, so check the request.
func TestReadIsConsistent(t *testing.T) {
	s, link := open(t)
	var body []byte
	link.On(func(r *http.Request) (_ *http.Response, err error) {
		if body, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		return transport.RoundTrip(r)
	})
	_, err := s.Read(t.Context(), rand.Text())
	require.ErrorIs(t, err, resource.ErrNotFound)
	require.Contains(t, string(body), `"ConsistentRead":true`)
}

func TestLostReply(t *testing.T) {
	s, link := open(t)
	other, linkOther := open(t, once)
	awstest.LostReply(t, rand.Text(), s, link, other, linkOther)
	awstest.LostReplyThenLaterFence(t, rand.Text(), s, link, other)
}

type limited struct{ aws.RetryerV2 }

func (limited) GetAttemptToken(context.Context) (func(error) error, error) { return nil, io.EOF }

func TestRateLimit(t *testing.T) {
	s, link := open(t, func(o *dynamodb.Options) { o.Retryer = limited{retry.NewStandard()} })
	require.ErrorIs(t, s.Write(t.Context(), rand.Text(), at(1), nil), io.EOF)
	require.Zero(t, link.Total())
	s, _ = open(t, func(o *dynamodb.Options) { o.Retryer = struct{ aws.Retryer }{retry.NewStandard()} })
	require.NoError(t, s.Write(t.Context(), rand.Text(), at(1), nil))
}

func TestTooLarge(t *testing.T) {
	s, link := open(t)
	ctx, key := t.Context(), rand.Text()
	key += strings.Repeat("k", resource.MaxKeyLen-len(key))
	const most = 400<<10 - 512 - 41 - len("keyfencevalue")
	for _, write := range []func(context.Context, string, resource.Fence, []byte) error{s.Write, s.Overwrite} {
		err := write(ctx, key, at(1), make([]byte, most+1))
		require.ErrorIs(t, err, resource.ErrTooLarge)
		require.ErrorContains(t, err, "has 409035 bytes, at most 409034 fit into an item")
	}
	require.Zero(t, link.Total())
	require.NoError(t, s.Write(ctx, key, at(1), make([]byte, most)))
}

func TestItem(t *testing.T) {
	s, _ := open(t)
	ctx, key, client := t.Context(), rand.Text(), newClient(transport)
	id := map[string]types.AttributeValue{"key": &types.AttributeValueMemberS{Value: key}}
	item := map[string]types.AttributeValue{"key": id["key"], "owner": &types.AttributeValueMemberS{Value: "acme"}}
	_, err := client.PutItem(ctx, &dynamodb.PutItemInput{TableName: &table, Item: item})
	require.NoError(t, err)
	_, err = s.Read(ctx, key)
	require.ErrorIs(t, err, resource.ErrNotFound)
	require.ErrorIs(t, s.SetFence(ctx, key, 7), resource.ErrNotFound)

	require.NoError(t, s.Write(ctx, key, resource.Fence{Token: math.MaxUint64, Seq: 2}, []byte("v")))
	got, err := client.GetItem(ctx, &dynamodb.GetItemInput{TableName: &table, Key: id})
	require.NoError(t, err)
	item["fence"] = &types.AttributeValueMemberS{Value: "18446744073709551615.00000000000000000002"}
	item["value"] = &types.AttributeValueMemberB{Value: []byte("v")}
	require.Equal(t, item, got.Item)
}

func TestForeignItem(t *testing.T) {
	s, _ := open(t)
	ctx, key, client := t.Context(), rand.Text(), newClient(transport)
	text := func(s string) types.AttributeValue { return &types.AttributeValueMemberS{Value: s} }
	fence := text("00000000000000000007.00000000000000000001")
	for _, c := range []struct {
		name         string
		fence, value types.AttributeValue
		want         string
	}{
		{"short fence", text("7.1"), nil, `its fence is "7.1", want two numbers of 20 digits`},
		{"no fence", text("x"), nil, `its fence is "x"`},
		{"value of another type", fence, text("v"), "its value has type"},
	} {
		item := map[string]types.AttributeValue{"key": text(key), "fence": c.fence}
		if c.value != nil {
			item["value"] = c.value
		}
		_, err := client.PutItem(ctx, &dynamodb.PutItemInput{TableName: &table, Item: item})
		require.NoError(t, err)
		_, err = s.Read(ctx, key)
		require.ErrorContains(t, err, c.want, c.name)
		_, err = s.ReadFenced(ctx, key, resource.Fence{Token: 5})
		require.ErrorContains(t, err, c.want, c.name)
	}
}

func TestNoTable(t *testing.T) {
	s, err := dynamostore.New(newClient(transport), table+"-none")
	require.NoError(t, err)
	calls := eachcall.Of(s, "k", at(1))
	calls["Overwrite without a fence"] = func(ctx context.Context) error { return s.Overwrite(ctx, "k", resource.Fence{}, nil) }
	for name, call := range calls {
		err := call(t.Context())
		require.ErrorContains(t, err, "dynamostore: ", name)
		_, missing := errors.AsType[*types.ResourceNotFoundException](err)
		require.True(t, missing, "%s: %v", name, err)
	}
}

func TestNewRefuses(t *testing.T) {
	_, err := dynamostore.New(nil, table)
	require.ErrorContains(t, err, "client is nil")
	_, err = dynamostore.New(newClient(transport), "")
	require.ErrorContains(t, err, "table is empty")
}
