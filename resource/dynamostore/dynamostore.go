// Package dynamostore is a [resource.Store] in a table of Amazon DynamoDB: one item a key, and every call one request.
//
// A write is an UpdateItem with the condition
//
//	attribute_not_exists(fence) OR fence < :fence
//
// which DynamoDB checks in the step in which it writes
// (https://docs.aws.amazon.com/amazondynamodb/latest/developerguide/Expressions.ConditionExpressions.html). A refused one
// returns what the item holds in the same reply. A fenced read is the same update without a value.
//
// The fence is one string of fixed width, the token and the sequence number in 20 decimal digits each, so that strings
// compare as fences do. Both don't fit in a DynamoDB number, which is exact to 38 digits, and two numbers would need a
// condition of three comparisons.
//
// # What it rests on
//
// The table belongs to one region. A global table with eventual consistency (MREC, the default) checks a condition against
// its own replica and lets the last writer win across regions, so that a stale write in another region gets through:
// fencing doesn't hold there, unless all writes of a key go to one region. Global tables with strong consistency (MRSC)
// compare with the latest version
// (https://docs.aws.amazon.com/amazondynamodb/latest/developerguide/V2globaltables_HowItWorks.html).
//
// Nobody else writes the attributes fence and value or deletes items, by hand or by TTL: a fence that is gone fences no
// more. A table restored from a backup has the fences of that time. Other attributes of an item are left alone.
//
// Reads are strongly consistent ones; DynamoDB Accelerator (DAX) has no part in this.
package dynamostore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb/types"

	"github.com/fencelab/fencelab/resource"
)

// The attributes of an item. An item that only fenced reads have touched has no value.
const (
	attrKey   = "key"
	attrFence = "fence"
	attrValue = "value" // a reserved word, so that expressions need a name for it
)

// maxItem is what an item may have in bytes: names, and values as they are
// (https://docs.aws.amazon.com/amazondynamodb/latest/developerguide/Constraints.html).
const maxItem = 400 << 10

// Store is a [resource.Store] in a table. Its methods may be called concurrently, also in several processes.
type Store struct {
	client *dynamodb.Client
	table  string

	mu     sync.Mutex
	closed bool
	calls  sync.WaitGroup // calls in flight
}

var (
	_ resource.Overwriter  = (*Store)(nil)
	_ resource.FenceSetter = (*Store)(nil)
)

// New returns a Store on a table that exists, with a partition key named "key" of type S and no sort key: see [CreateTable].
// The client stays the caller's. It sends nothing.
func New(client *dynamodb.Client, table string) (*Store, error) {
	switch {
	case client == nil:
		return nil, errors.New("dynamostore: client is nil")
	case table == "":
		return nil, errors.New("dynamostore: table is empty")
	}
	return &Store{client: client, table: table}, nil
}

// Schema is the least that [New]'s table needs, billed by request. It may have whatever else a table can have.
func Schema(table string) *dynamodb.CreateTableInput {
	return &dynamodb.CreateTableInput{
		TableName:            &table,
		BillingMode:          types.BillingModePayPerRequest,
		AttributeDefinitions: []types.AttributeDefinition{{AttributeName: aws.String(attrKey), AttributeType: types.ScalarAttributeTypeS}},
		KeySchema:            []types.KeySchemaElement{{AttributeName: aws.String(attrKey), KeyType: types.KeyTypeHash}},
	}
}

// CreateTable creates a table by [Schema] and returns when it can be used. A table of that name that exists is left as it
// is, and is no error.
func CreateTable(ctx context.Context, client *dynamodb.Client, table string) error {
	_, err := client.CreateTable(ctx, Schema(table))
	if _, exists := errors.AsType[*types.ResourceInUseException](err); err != nil && !exists {
		return failed(ctx, err)
	}
	in := &dynamodb.DescribeTableInput{TableName: &table}
	out, err := client.DescribeTable(ctx, in)
	_, unseen := errors.AsType[*types.ResourceNotFoundException](err) // DescribeTable may not know of it yet
	if unseen || err == nil && out.Table.TableStatus == types.TableStatusCreating {
		err = dynamodb.NewTableExistsWaiter(client).Wait(ctx, in, 5*time.Minute)
	}
	if err != nil {
		return failed(ctx, err)
	}
	return nil
}

// Write is [resource.Store.Write]. A value that doesn't fit into an item (400 KB with key and names) is refused with
// [resource.ErrTooLarge].
//
// The client repeats a request whose reply was lost. If the first one had taken effect, Write returns
// nil, or, if a later fence has come in between, an error that leaves the outcome open.
func (s *Store) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckFence(f), checkSize(key, value)); err != nil {
		return err
	}
	if err := s.enter(); err != nil {
		return err
	}
	defer s.calls.Done()
	doubt := false
	_, seen, err := s.raise(ctx, key, f, value, true, &doubt)
	if err != nil || seen == nil {
		return err
	}
	err = seen.CheckWrite(key, f, value)
	stale, ok := errors.AsType[*resource.StaleTokenError](err)
	switch {
	case !ok:
		return fmt.Errorf("dynamostore: Write of %q at %v was refused by an item whose fence is %v", key, f, seen.MaxFence)
	case doubt && stale.Applied:
		return nil
	case doubt:
		return fmt.Errorf("dynamostore: Write of %q at %v: a reply was lost and a later fence has come since; the write may have "+
			"taken effect before: seen %v", key, f, stale.Seen)
	}
	return err
}

// ReadFenced is [resource.Store.ReadFenced].
func (s *Store) ReadFenced(ctx context.Context, key string, token uint64) (resource.Record, error) {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckToken(token)); err != nil {
		return resource.Record{}, err
	}
	if err := s.enter(); err != nil {
		return resource.Record{}, err
	}
	defer s.calls.Done()
	rec, seen, err := s.raise(ctx, key, resource.Fence{Token: token}, nil, false, new(bool))
	if err != nil || seen == nil {
		return rec, err
	}
	if err := seen.CheckRead(key, token); err != nil {
		return resource.Record{}, err
	}
	return *seen, nil // its own grant has touched the key before
}

// Read is [resource.Store.Read].
func (s *Store) Read(ctx context.Context, key string) (resource.Record, error) {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key)); err != nil {
		return resource.Record{}, err
	}
	if err := s.enter(); err != nil {
		return resource.Record{}, err
	}
	defer s.calls.Done()
	out, err := s.client.GetItem(ctx, &dynamodb.GetItemInput{TableName: &s.table, Key: id(key), ConsistentRead: aws.Bool(true)})
	if err != nil {
		return resource.Record{}, failed(ctx, err)
	}
	rec, err := s.decode(key, out.Item)
	if err == nil && rec.Value == nil && rec.MaxFence == (resource.Fence{}) {
		err = resource.ErrNotFound
	}
	return rec, err
}

// Overwrite is [resource.Overwriter.Overwrite]. It takes one request, and a second one if f is not zero and less than the
// item's fence.
func (s *Store) Overwrite(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckOffered(f), checkSize(key, value)); err != nil {
		return err
	}
	if err := s.enter(); err != nil {
		return err
	}
	defer s.calls.Done()
	if f != (resource.Fence{}) {
		_, seen, err := s.raise(ctx, key, f, value, true, new(bool))
		if err != nil || seen == nil {
			return err
		}
	}
	_, err := s.client.UpdateItem(ctx, &dynamodb.UpdateItemInput{
		TableName: &s.table, Key: id(key), UpdateExpression: aws.String("SET #value = :value"),
		ExpressionAttributeNames:  map[string]string{"#value": attrValue},
		ExpressionAttributeValues: map[string]types.AttributeValue{":value": bytesValue(value)},
	})
	if err != nil {
		return failed(ctx, err)
	}
	return nil
}

// SetFence is [resource.FenceSetter.SetFence].
func (s *Store) SetFence(ctx context.Context, key string, token uint64) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckToken(token)); err != nil {
		return err
	}
	if err := s.enter(); err != nil {
		return err
	}
	defer s.calls.Done()
	_, err := s.client.UpdateItem(ctx, &dynamodb.UpdateItemInput{
		TableName: &s.table, Key: id(key), UpdateExpression: aws.String("SET fence = :fence"),
		ConditionExpression:       aws.String("attribute_exists(fence)"),
		ExpressionAttributeValues: map[string]types.AttributeValue{":fence": &types.AttributeValueMemberS{Value: encode(resource.Fence{Token: token})}},
	})
	if _, missing := errors.AsType[*types.ConditionalCheckFailedException](err); missing {
		return resource.ErrNotFound
	}
	if err != nil {
		return failed(ctx, err)
	}
	return nil
}

// Close is [resource.Store.Close]. The client stays open.
func (s *Store) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.calls.Wait()
	return nil
}

// enter counts a call in, or says why it can't be served.
func (s *Store) enter() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return resource.ErrClosed
	}
	s.calls.Add(1)
	return nil
}

// raise raises the fence of key's item to f, and sets its value if hasValue, if f is greater than the fence. It returns
// the item as it is then, or, as seen, the item that refused. doubt is set when a reply was lost, so that the update may
// have taken effect though the repeat was refused.
func (s *Store) raise(ctx context.Context, key string, f resource.Fence, value []byte, hasValue bool, doubt *bool,
) (rec resource.Record, seen *resource.Record, err error) {
	in := &dynamodb.UpdateItemInput{
		TableName:                           &s.table,
		Key:                                 id(key),
		UpdateExpression:                    aws.String("SET fence = :fence"),
		ConditionExpression:                 aws.String("attribute_not_exists(fence) OR fence < :fence"),
		ExpressionAttributeValues:           map[string]types.AttributeValue{":fence": &types.AttributeValueMemberS{Value: encode(f)}},
		ReturnValues:                        types.ReturnValueAllNew,
		ReturnValuesOnConditionCheckFailure: types.ReturnValuesOnConditionCheckFailureAllOld,
	}
	if hasValue {
		in.UpdateExpression = aws.String("SET fence = :fence, #value = :value")
		in.ExpressionAttributeNames = map[string]string{"#value": attrValue}
		in.ExpressionAttributeValues[":value"] = bytesValue(value)
		in.ReturnValues = types.ReturnValueNone
	}
	out, err := s.client.UpdateItem(ctx, in, func(o *dynamodb.Options) { o.Retryer = watched{o.Retryer, doubt} })
	refusal, refused := errors.AsType[*types.ConditionalCheckFailedException](err)
	switch {
	case refused && len(refusal.Item) == 0:
		return rec, nil, fmt.Errorf("dynamostore: the server refused a call on %q and didn't say what the item holds "+
			"(ReturnValuesOnConditionCheckFailure): %w", key, err)
	case refused:
		rec, err = s.decode(key, refusal.Item)
		return rec, &rec, err
	case err != nil:
		return rec, nil, failed(ctx, err)
	case !hasValue:
		rec, err = s.decode(key, out.Attributes)
	}
	return rec, nil, err
}

func id(key string) map[string]types.AttributeValue {
	return map[string]types.AttributeValue{attrKey: &types.AttributeValueMemberS{Value: key}}
}

// bytesValue copies b; an empty one is not to be nil, which would be no value.
func bytesValue(b []byte) types.AttributeValue {
	return &types.AttributeValueMemberB{Value: append([]byte{}, b...)}
}

// digits is the width of the greatest uint64.
const digits = 20

func encode(f resource.Fence) string { return fmt.Sprintf("%0*d.%0*d", digits, f.Token, digits, f.Seq) }

func (s *Store) decode(key string, item map[string]types.AttributeValue) (resource.Record, error) {
	var rec resource.Record
	switch a := item[attrFence].(type) {
	case nil:
	case *types.AttributeValueMemberS:
		var err error
		if rec.MaxFence, err = parse(a.Value); err != nil {
			return rec, fmt.Errorf("dynamostore: item %q of table %s: %w", key, s.table, err)
		}
	default:
		return rec, fmt.Errorf("dynamostore: item %q of table %s: its fence has type %T, want a string", key, s.table, a)
	}
	switch a := item[attrValue].(type) {
	case nil:
	case *types.AttributeValueMemberB:
		rec.Value = append([]byte{}, a.Value...)
	default:
		return rec, fmt.Errorf("dynamostore: item %q of table %s: its value has type %T, want bytes", key, s.table, a)
	}
	return rec, nil
}

func parse(fence string) (f resource.Fence, err error) {
	token, seq, _ := strings.Cut(fence, ".")
	t, errToken := strconv.ParseUint(token, 10, 64)
	n, errSeq := strconv.ParseUint(seq, 10, 64)
	f = resource.Fence{Token: t, Seq: n}
	if errToken != nil || errSeq != nil || encode(f) != fence {
		return resource.Fence{}, fmt.Errorf("its fence is %.60q, want two numbers of %d digits with a point between", fence, digits)
	}
	return f, nil
}

func checkSize(key string, value []byte) error {
	most := maxItem - len(attrKey) - len(key) - len(attrFence) - len(encode(resource.Fence{})) - len(attrValue)
	if len(value) <= most {
		return nil
	}
	return fmt.Errorf("%w: that of %q has %d bytes, at most %d fit into an item", resource.ErrTooLarge, key, len(value), most)
}

// failed wraps a client's error. After ctx's end that is ctx.Err at best, which doesn't tell the cause.
func failed(ctx context.Context, err error) error {
	if ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		return fmt.Errorf("dynamostore: %w: %w", context.Cause(ctx), err)
	}
	return fmt.Errorf("dynamostore: %w", err)
}

// watched is a client's retryer that notes whether an attempt may have taken effect though it failed: every one that the
// server has not refused.
type watched struct {
	aws.Retryer
	doubt *bool
}

func (w watched) IsErrorRetryable(err error) bool {
	code := 0
	if r, ok := errors.AsType[interface {
		error
		HTTPStatusCode() int
	}](err); ok {
		code = r.HTTPStatusCode()
	}
	if code < 400 || code >= 500 {
		*w.doubt = true
	}
	return w.Retryer.IsErrorRetryable(err)
}

// GetAttemptToken keeps the rate limit of a retryer that has one.
func (w watched) GetAttemptToken(ctx context.Context) (func(error) error, error) {
	if r, ok := w.Retryer.(aws.RetryerV2); ok {
		return r.GetAttemptToken(ctx)
	}
	return w.GetInitialToken(), nil
}
